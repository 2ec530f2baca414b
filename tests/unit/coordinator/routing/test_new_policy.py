"""The recipe for a routing policy in docs/extending.md, followed: its file beside the others, and its line."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from p2pserve.coordinator import Load, NoRoute, Pairing, Phase, Plan, Replica, Router, Stage
from p2pserve.coordinator.routing import policies
from p2pserve.coordinator.routing.interface import PolicyError, RoutingSettings

ROOT = Path(__file__).parents[4]
PHASES = {"p1": Phase.PREFILL, "p2": Phase.PREFILL, "d1": Phase.DECODE, "d2": Phase.DECODE}
NAME = "p2pserve.coordinator.routing.fewest"


def recipe() -> tuple[str, str]:
    """The new file's text, and the line of the registry."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = re.search(r"^## A routing policy\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    file, line = re.findall(r"```python\n(.*?)```", section[1], flags=re.DOTALL)
    return file, line


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ModuleType]:
    """A copy of the list of policies, with the recipe's line in place of its own."""
    file, line = recipe()
    text = (ROOT / "coordinator" / "routing" / "policies.py").read_text(encoding="utf-8")
    assert text.count("NETWORK_POLICIES: Final") == 1
    text = re.sub(r"^NETWORK_POLICIES: Final.*?\}$", lambda _: line.strip(), text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace("from .interface", "from .fewest import FewestRequests\nfrom .interface")
    made = []
    for name, source in ((NAME, file), (f"{NAME}_listed", text)):
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made.append(module)
    yield made[-1]
    for module in made:
        del sys.modules[module.__name__]


@pytest.fixture
def plan() -> Plan:
    replicas = tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=4),))
        for name, phase in PHASES.items()
    )
    pairings = (Pairing(prefill="p1", decode="d1", weight=1.0),)
    return Plan(epoch=1, version=1, service="llama", replicas=replicas, pairings=pairings, codec="kv4", why=())


def test_one_file_and_one_line_make_a_routing_policy(registry: ModuleType, plan: Plan) -> None:
    router = Router(plan, RoutingSettings(policy="fewest"), policies=registry.NETWORK_POLICIES)
    counts = {"p1": 3, "p2": 1, "d1": 2, "d2": 5}
    router.report(
        Load(replica=name, outstanding=count, prefill_tokens=0, kv_free_tokens=9) for name, count in counts.items()
    )
    route = router.route(70)
    assert (route.prefill, route.decode, route.split) == ("p2", "d1", 70)
    route = router.route(70, frozenset({"p2", "d1"}))
    assert (route.prefill, route.decode) == ("p1", "d2")
    with pytest.raises(NoRoute, match="llama"):
        router.route(70, frozenset({"d1", "d2"}))


def test_without_the_line_nobody_knows_it(plan: Plan) -> None:
    with pytest.raises(PolicyError, match="'fewest', none of predicted"):
        Router(plan, RoutingSettings(policy="fewest"), policies=policies.NETWORK_POLICIES)
