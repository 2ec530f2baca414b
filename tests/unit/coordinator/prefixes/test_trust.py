"""What replicas say of their prefixes is believed as far as first tokens come sooner by it."""

from collections.abc import Sequence
from functools import partial

import pytest

from p2pserve.coordinator.prefixes.held import PrefixNews, PrefixVersion, pack_names
from p2pserve.coordinator.prefixes.knowledge import ExpectedPrefill, PrefixKnowledge
from p2pserve.coordinator.prefixes.trust import HitTrust

SPEED = 1000.0  # tokens per second


def _names(names: Sequence[int], block_tokens: int) -> Sequence[int]:
    return names


def observe(trust: HitTrust, replica: str, named: int, computed: int, times: int = 1) -> None:
    for _ in range(times):
        trust.observe(replica, tokens=1000, named=named, seconds=computed / SPEED)


def test_a_replica_whose_prefixes_save_what_they_should_is_believed() -> None:
    trust = HitTrust()
    observe(trust, "a", 0, 1000, 3)
    observe(trust, "a", 800, 200, 20)
    assert trust.share("a") == 1.0
    observe(trust, "a", 800, 500, 20)  # half of it: times are rough
    assert trust.share("a") == 1.0


def test_one_whose_prefixes_save_nothing_is_believed_less_and_less() -> None:
    trust = HitTrust()
    observe(trust, "a", 0, 1000, 3)
    shares = []
    for _ in range(20):
        observe(trust, "a", 900, 1000)
        shares.append(trust.share("a"))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.1
    observe(trust, "a", 900, 100, 20)  # and more again once they do
    assert trust.share("a") > 0.9


def test_of_one_that_names_all_prompts_others_say_how_fast_it_should_be() -> None:
    trust = HitTrust()
    observe(trust, "honest", 0, 1000)
    observe(trust, "liar", 999, 1000, 20)
    assert trust.share("liar") < 0.1
    assert trust.share("honest") == 1.0


@pytest.mark.parametrize(("tokens", "named", "seconds"), [(0, 0, 1.0), (1000, 100, 1.0), (1000, 900, 0.0)])
def test_what_says_nothing_changes_nothing(tokens: int, named: int, seconds: float) -> None:
    trust = HitTrust()
    observe(trust, "a", 0, 1000)
    trust.observe("a", tokens=tokens, named=named, seconds=seconds)
    assert trust.share("a") == 1.0


def test_a_gateway_learns_from_its_own_requests() -> None:
    known = PrefixKnowledge()
    news = PrefixNews(version=PrefixVersion(1, 1), block_tokens=100, held=pack_names(range(1, 10)))
    for name in ("honest", "liar"):
        known.index.take(name, news)
    for number in range(40):
        names, named = (range(1, 10), 900) if number % 2 else ((77,), 0)
        for name, saves in (("honest", named), ("liar", 0)):
            request, now = (name, number), 100.0 * number
            known.note_route(request, name, partial(_names, names), ExpectedPrefill(now, 1000, 0, named))
            known.note_end(request, 100.0 * number + (1000 - saves) / SPEED)
    found = known.believe(known.find_named(partial(_names, range(1, 10)), 1e6))
    assert found["honest"] == 900
    assert found["liar"] < 90
    known.keep(["honest"])
    assert set(known.find_named(partial(_names, range(1, 10)), 1e6)) == {"honest"}
