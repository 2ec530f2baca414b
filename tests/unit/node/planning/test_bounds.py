"""Every number of an advert and of a link table at its bounds, one after the other, through to the planner."""

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import msgspec.inspect as types

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.dev.fuzz_report import ControlFuzzReport
from p2pserve.bootstrap.dev.mutations import FLOATS, INTEGERS
from p2pserve.node.dev.fuzz_planning import PlanningAttack, plausible_advert
from p2pserve.node.messages import Advert, LinkTable
from p2pserve.node.view import NetworkView

HONEST, HOSTILE = PeerId("p1"), PeerId("p2")
FIGURES = {"rtt_s": 0.02, "one_stream_gbps": 0.5, "capacity_gbps": 1.0, "loss": 0.01, "usd_per_gb": 0.01}
TABLE = {"site": "fra", "box": {"up_gbps": 1.0, "up_usd_per_gb": 0.01}, "links": {HONEST: FIGURES}}
SERVING, LAYERS, ASKED = (msgspec.msgpack.decode(plausible_advert(1, kind)) for kind in (1, 2, 3))
ADVERT = SERVING | {"demand": ASKED["demand"]}

Path = tuple[Any, ...]


def numbers(kind: types.Type, value: Any) -> Iterator[tuple[Path, Iterable[float]]]:
    """Where in a value there are numbers, with those at the bounds of each; where types have none, with many."""
    match kind:
        case types.IntType():
            yield (), [bound for bound in (kind.ge, kind.le) if bound is not None] or INTEGERS
        case types.FloatType():
            low = kind.ge if kind.gt is None else 5e-324
            yield (), FLOATS if low is None else [low, 5e-324, *([] if kind.le is None else [kind.le])]
        case types.UnionType():
            for each in kind.types:
                if not isinstance(each, types.NoneType):
                    yield from numbers(each, value)
        case types.StructType():
            for field in kind.fields:
                if value.get(field.name) is not None:
                    yield from _below(field.name, field.type, value[field.name])
        case types.VarTupleType() | types.ListType() if value:
            yield from _below(0, kind.item_type, value[0])
        case types.TupleType():
            for at, item in enumerate(kind.item_types):
                yield from _below(at, item, value[at])
        case types.DictType():
            for key, each in value.items():
                yield from _below(key, kind.value_type, each)


def _below(key: Any, kind: types.Type, value: Any) -> Iterator[tuple[Path, Iterable[float]]]:
    for path, bounds in numbers(kind, value):
        yield (key, *path), bounds


def put(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value there."""
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: put(value[path[0]], path[1:], new)}
    return [put(each, path[1:], new) if at == path[0] else each for at, each in enumerate(value)]


def at_bounds(kind: Any, value: Any) -> list[Any]:
    """This value with each of its numbers at a bound, as far as it is taken then."""
    found = (put(value, path, bound) for path, bounds in numbers(types.type_info(kind), value) for bound in bounds)
    return [each for each in found if is_taken(kind, each)]


def is_taken(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def plan_for_each(adverts: Iterable[Any], tables: Iterable[Any]) -> int:
    """Plan for an honest box and one that says this; with its figures or, where those make planning fail, without."""
    report, count = ControlFuzzReport(), 0
    for advert, table in itertools.product(adverts, tables):
        view = NetworkView()
        view.update({HONEST: plausible_advert(0, 0), HOSTILE: msgspec.msgpack.encode(advert)})
        view.update_links({HOSTILE: msgspec.msgpack.encode(table)})
        PlanningAttack(random.Random(0), report).plan_with(view)
        count += 1
        assert report.outcomes["planned"] >= count
    return count


def test_an_advert_with_any_number_at_its_bounds_is_planned_with_or_set_aside() -> None:
    assert plan_for_each(at_bounds(Advert, ADVERT), [TABLE]) > 60


def test_a_box_with_some_layers_and_any_number_at_its_bounds_is_planned_with_or_set_aside() -> None:
    fields = ("fits", "tp", "model", "usd_per_hour")
    said = [
        advert for advert in at_bounds(Advert, LAYERS) if any(advert[f] != LAYERS.get(f) for f in fields if f in advert)
    ]
    assert plan_for_each(said, [TABLE]) > 20


def test_a_link_table_with_any_number_at_its_bounds_is_planned_with_or_set_aside() -> None:
    assert plan_for_each([SERVING], at_bounds(LinkTable, TABLE)) > 30
