"""The fuzzer of the control plane: a short run finds nothing, the same seed gives the same run, and it can find
something."""

import random
from collections.abc import Iterable

import msgspec
import pytest

from p2pserve.bootstrap.dev.fuzz_members import MemberAttack, membership_payloads
from p2pserve.bootstrap.dev.fuzz_report import ControlFuzzReport
from p2pserve.bootstrap.dev.mutations import made_up, mutated_encoding, varied
from p2pserve.bootstrap.members.peering import Peering
from p2pserve.bootstrap.members.table import EntryRules
from p2pserve.coordinator import Demand
from p2pserve.node.dev.fuzz import fuzz
from p2pserve.node.dev.fuzz_messages import MessageMaker, said_by_peers
from p2pserve.node.dev.fuzz_planning import make_advert, make_links, make_plan
from p2pserve.node.messages import ADVERT, Advert, LinkTable
from p2pserve.node.view import decode_plan


def test_a_short_fuzz_finds_nothing() -> None:
    report = fuzz(30_000, seed=7)
    assert report.inputs >= 30_000
    assert 0 < report.refused < report.inputs
    assert {f"message {kind.__name__}" for kind in said_by_peers()} <= report.by_target.keys()
    assert report.outcomes["planned"] > 0  # it came through to the planner
    assert report.outcomes["entries held"] > 5 * report.outcomes["attacks on members"]
    assert report.outcomes["led"] > 0


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

    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError)):
        attack(EntryRules(), read)


def test_an_input_that_takes_long_is_reported() -> None:
    report = ControlFuzzReport()
    report.note("quick", 0.1)
    with pytest.raises(AssertionError, match=r"an input of slow took 2\.5 s"):
        report.note("slow", 2.5)
    assert (report.slowest, report.inputs) == ("slow", 2)


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
    assert all(decode_plan(make_plan(rng)) is not None for _ in range(50))


def test_mutations_differ_from_what_they_are_made_of_and_keep_to_its_structure_often() -> None:
    rng = random.Random(3)
    honest = make_plan(rng)
    made = [mutated_encoding(rng, honest) for _ in range(400)]
    assert sum(each != honest for each in made) > 350
    plans = sum(decode_plan(each) is not None for each in made)
    assert 20 < plans < 350


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
