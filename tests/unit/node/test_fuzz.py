"""The fuzzer of the control plane: a short run finds nothing, the same seed gives the same run, and it can find
something."""

import importlib
import pkgutil
import random
from collections.abc import Iterable, Iterator
from typing import get_args

import msgspec
import msgspec.inspect as types
import pytest

from p2pserve.bootstrap import members
from p2pserve.bootstrap.dev.fuzz_members import READ_BY_MEMBERS, MemberAttack, membership_payloads
from p2pserve.bootstrap.dev.fuzz_report import MAX_INPUT_MIB, MAX_INPUT_S, ControlFuzzReport
from p2pserve.bootstrap.dev.mutations import made_up, mutated_encoding, varied
from p2pserve.bootstrap.errors import DECODE_ERRORS
from p2pserve.bootstrap.members.peering import Peering
from p2pserve.bootstrap.members.states import EntryRules, GossipMessage
from p2pserve.bootstrap.streams import control
from p2pserve.coordinator import Demand, Plan
from p2pserve.node.dev.fuzz import fuzz
from p2pserve.node.dev.fuzz_messages import MessageMaker, said_by_peers
from p2pserve.node.dev.fuzz_planning import make_advert, make_links, make_manifest, make_plan
from p2pserve.node.messages import ADVERT, Advert, ExactMessage, LinkTable, Message
from p2pserve.node.planning.messages import PlanManifest


def test_a_short_fuzz_finds_nothing() -> None:
    report = fuzz(30_000, seed=7)
    assert report.inputs >= 30_000
    assert 0 < report.refused < report.inputs
    assert {f"message {kind.__name__}" for kind in said_by_peers()} <= report.by_target.keys()
    assert {f"gossip {kind.__name__}" for kind in get_args(GossipMessage)} <= report.by_target.keys()
    assert set(BEHIND_A_READER.values()) <= report.by_target.keys()
    assert report.outcomes["planned"] > 0  # it came through to the planner
    assert report.outcomes["entries held"] > 5 * report.outcomes["attacks on members"]
    assert report.outcomes["led"] > 0


# -- nothing that is read is left out ---------------------------------------------------------------------------------

BEHIND_A_READER = {  # read by functions that the fuzzer calls with bytes, under these names in its report
    "_AnyHello": "greetings",
    "_Body": "tokens",
    "_Certificate": "certificates",
    "_Claim": "payloads of membership",
    "_Objection": "payloads of membership",
    "MemberRecord": "payloads of membership",
    "Credential": "payloads of membership",
    "Orders": "orders",
    "Renewal": "orders",
}
OF_THIS_BOX = frozenset({"Catalogue", "Issued", "Wish"})  # in a file of the owner's; nothing of it comes from peers


def structs_in(kind: types.Type) -> Iterator[type]:
    """The classes that a type is made of."""
    match kind:
        case types.Metadata():
            yield from structs_in(kind.type)
        case types.StructType():
            yield kind.cls
            for each in kind.fields:
                yield from structs_in(each.type)
        case types.UnionType():
            for item in kind.types:
                yield from structs_in(item)
        case types.TupleType():
            for item in kind.item_types:
                yield from structs_in(item)
        case types.VarTupleType() | types.ListType():
            yield from structs_in(kind.item_type)
        case types.DictType():
            yield from structs_in(kind.value_type)


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_message_of_network_and_nodes_is_fuzzed() -> None:
    """A new one has to be added: to `said_by_peers` (by being in the catalogue), `READ_BY_MEMBERS` or `WireAttack`."""
    roots = (*said_by_peers(), *READ_BY_MEMBERS, control.Greeting, control.Message)
    fuzzed = {found for root in roots for found in structs_in(types.type_info(root))}
    there = [
        each
        for each in subclasses(msgspec.Struct)
        if each.__module__.startswith("p2pserve.bootstrap.") or each.__module__ == "p2pserve.node.messages"
    ]
    left_out = {
        each
        for each in there
        if each not in fuzzed
        and each.__name__ not in BEHIND_A_READER.keys() | OF_THIS_BOX
        and each not in (Message, ExactMessage)
    }
    assert not left_out
    assert BEHIND_A_READER.keys() <= {each.__name__ for each in there}


def test_every_kind_of_entry_is_fuzzed() -> None:
    names = [f"{members.__name__}.{each.name}" for each in pkgutil.iter_modules(members.__path__)]
    kinds = {
        value
        for module in map(importlib.import_module, names)
        for name, value in vars(module).items()
        if name.endswith("_KIND")
    }
    assert len(kinds) >= 5
    assert kinds <= membership_payloads().keys()


# -- it can find something --------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = fuzz(3_000, seed=8), fuzz(3_000, seed=8)
    assert (one.by_target, one.outcomes, one.refused) == (other.by_target, other.outcomes, other.refused)


def attack(rules: EntryRules, on_entries: object = None) -> None:
    """Attacks until one finds something, or 200 have found nothing."""
    rng, report = random.Random(9), ControlFuzzReport()
    for _ in range(200):
        payloads = {**membership_payloads(), ADVERT: make_advert}
        looks = {} if on_entries is None else {"on_entries": on_entries}
        MemberAttack(rng, report, payloads, rules, **looks).run()  # type: ignore[arg-type]


def test_a_reader_that_trusts_a_number_is_found() -> None:
    def read_number(payload: bytes) -> object:
        return msgspec.msgpack.decode(payload)["epoch"]  # a KeyError for who leaves it out

    with pytest.raises((KeyError, TypeError, msgspec.DecodeError)):
        attack(EntryRules(numbered={ADVERT: read_number}))


def test_a_node_that_reads_entries_without_bounds_is_found() -> None:
    def read(peering: Peering) -> None:
        for entry in peering.table.entries(ADVERT).values():
            msgspec.msgpack.decode(entry.payload, type=Advert)

    with pytest.raises(DECODE_ERRORS):
        attack(EntryRules(), read)


def test_an_input_that_takes_long_ends_the_run() -> None:
    report = ControlFuzzReport()
    report.note("quick", 0.1)
    with pytest.raises(AssertionError, match=r"an input of slow took 2\.5 s"):
        report.note("slow", MAX_INPUT_S + 1.5)
    assert (report.slowest, report.inputs) == ("slow", 2)


def test_an_input_that_takes_much_memory_ends_the_run() -> None:
    report = ControlFuzzReport()
    report.note("small", 0.1)
    report.peak_mib -= MAX_INPUT_MIB + 1  # as if the process had been smaller before
    with pytest.raises(AssertionError, match=r"an input of large took 10\d MiB"):
        report.note("large", 0.1)


@pytest.mark.parametrize("kind", said_by_peers(), ids=lambda kind: kind.__name__)
def test_most_of_what_is_made_up_by_type_is_taken(kind: type[msgspec.Struct]) -> None:
    rng, maker = random.Random(1), MessageMaker(kind)
    if kind.__name__ != "Plan":  # weights that add up to one do not come by chance
        assert share_taken(kind, (maker.make(rng) for _ in range(50))) > 0.8


def share_taken(kind: type[msgspec.Struct], said: Iterable[bytes]) -> float:
    taken = total = 0
    for each in said:
        total += 1
        try:
            msgspec.msgpack.decode(each, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        taken += 1
    return taken / total


def test_adverts_tables_and_plans_are_mostly_such_that_they_count() -> None:
    rng = random.Random(2)
    assert share_taken(Advert, (make_advert(rng) for _ in range(200))) > 0.4
    assert share_taken(LinkTable, (make_links(rng) for _ in range(200))) > 0.9
    assert 0.6 < share_taken(PlanManifest, (make_manifest(rng) for _ in range(200))) <= 1.0


def test_mutations_differ_from_what_they_are_made_of_and_keep_to_its_structure_often() -> None:
    rng = random.Random(3)
    honest = make_plan(rng)
    made = [mutated_encoding(rng, honest) for _ in range(400)]
    assert sum(each != honest for each in made) > 350
    assert 20 < share_taken(Plan, made) * len(made) < 350


def test_values_are_made_up_at_the_edges_of_their_bounds() -> None:
    rng = random.Random(4)
    rates = {made_up(rng, Demand)["requests_s"] for _ in range(300)}
    assert {0.0, 1e6, 5e-324} <= rates
    assert max(rates) <= 1e6


def test_only_numbers_are_varied_where_only_they_are_to_be() -> None:
    rng = random.Random(5)
    honest = {"requests_s": 3.0, "arrival_cv": 1.0, "lengths": [[100, 20]]}
    assert varied(rng, Demand, honest, 0.0) == honest
    strange = varied(rng, Demand, honest, 1.0, numbers_only=True)
    assert strange.keys() == honest.keys()
    assert len(strange["lengths"]) == 1
