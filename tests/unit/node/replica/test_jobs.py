"""What a node tells of its load while its engine is in a step."""

from p2pserve.bootstrap import PeerId
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.replica.jobs import Job, count_untold

GATEWAY = PeerId("gateway")
TOLD = EngineStats(2, 1, 0.5, 4096, pending_prefill_tokens=300, decodes=2)


def job(since_s: float, *, tokens: int = 0, unread: int = 0) -> Job:
    return Job(GATEWAY, f"r{since_s}", since_s=since_s, tokens=tokens, unread=unread)


def test_requests_that_came_since_the_last_step_count_and_no_others() -> None:
    """Two are decoded, one waits for its prompt; then another of each kind comes."""
    decodes, prefills = [job(1.0, tokens=9), job(2.0, tokens=4)], [job(3.0, unread=300)]
    assert count_untold(TOLD, decodes, prefills) == TOLD
    found = count_untold(TOLD, [*decodes, job(5.0, unread=50)], [*prefills, job(4.0, unread=700)])
    assert found == EngineStats(2, 3, 0.5, 4096, pending_prefill_tokens=1050, decodes=3)


def test_a_prefill_whose_kv_is_on_its_way_is_no_load() -> None:
    decodes, prefills = [job(1.0, tokens=9), job(2.0, tokens=4)], [job(0.5, tokens=1, unread=900), job(3.0, unread=300)]
    assert count_untold(TOLD, decodes, prefills) == TOLD


def test_requests_that_have_ended_since_are_told_by_the_engine() -> None:
    assert count_untold(TOLD, [], []) == TOLD


def test_an_engine_that_has_told_nothing_yet_stays_silent() -> None:
    assert count_untold(None, [job(1.0, unread=10)], []) is None
