"""The emulated engine's scheduler: which request computes what in each step, and who holds how many blocks."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.coordinator.costs.step_times import DecodeLine, chunk_pairs
from p2pserve.node.engine.emulated.batching import Batch, BatchedRequest, Batcher, ScheduledTokens, step_s
from p2pserve.node.engine.emulated.tokens import EmulatedAnswer


def batcher(blocks: int = 100, block_size: int = 4, max_tokens: int = 10, max_requests: int = 8) -> Batcher:
    return Batcher(blocks=blocks, block_size=block_size, max_tokens=max_tokens, max_requests=max_requests)


def shown(batch: Batch) -> dict[str, tuple[int, int]]:
    """What a step computes: request -> (first position, how many)."""
    return {entry.sequence.request: (entry.first, entry.tokens) for entry in batch.scheduled}


def run(engine: Batcher) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """One step: what it computed, and who generated a token."""
    batch = engine.schedule()
    generated = [sequence.request for sequence in engine.complete(batch)]
    engine.check_integrity()
    return shown(batch), generated


def test_a_long_prompt_is_prefilled_in_chunks_beside_a_decode() -> None:
    engine = batcher(max_tokens=10)
    engine.add(BatchedRequest("a", prompt=3, max_tokens=9))
    assert run(engine) == ({"a": (0, 3)}, ["a"])
    engine.add(BatchedRequest("b", prompt=20, max_tokens=2))
    assert run(engine) == ({"a": (3, 1), "b": (0, 9)}, ["a"])
    assert run(engine) == ({"a": (4, 1), "b": (9, 9)}, ["a"])
    assert run(engine) == ({"a": (5, 1), "b": (18, 2)}, ["a", "b"])
    assert run(engine) == ({"a": (6, 1), "b": (20, 1)}, ["a", "b"])
    assert run(engine)[0] == {"a": (7, 1)}
    assert (engine.running, engine.waiting) == (1, 0)


def test_steps_can_be_limited_while_the_engine_runs_but_never_below_what_decodes() -> None:
    engine = batcher(max_tokens=10, max_requests=3)
    engine.add(BatchedRequest("a", prompt=40, max_tokens=1))
    assert run(engine)[0] == {"a": (0, 10)}
    engine.limit_step(4)
    assert run(engine)[0] == {"a": (10, 4)}
    engine.limit_step(1)
    assert run(engine)[0] == {"a": (14, 3)}
    engine.limit_step(99)
    assert run(engine)[0] == {"a": (17, 10)}
    engine.limit_step(4)
    engine.limit_step(0)
    assert run(engine)[0] == {"a": (27, 10)}


def test_several_prompts_share_the_budget_in_order() -> None:
    engine = batcher(max_tokens=10)
    for name, prompt in (("a", 4), ("b", 5), ("c", 6)):
        engine.add(BatchedRequest(name, prompt, max_tokens=1))
    assert run(engine) == ({"a": (0, 4), "b": (0, 5), "c": (0, 1)}, ["a", "b"])
    assert run(engine) == ({"c": (1, 5)}, ["c"])
    assert run(engine) == ({}, [])
    assert engine.free_tokens == 400


def test_no_more_requests_run_than_there_are_places() -> None:
    engine = batcher(max_requests=2)
    for name in "abc":
        engine.add(BatchedRequest(name, 2, max_tokens=2))
    assert list(run(engine)[0]) == ["a", "b"]
    assert engine.waiting == 1
    assert run(engine)[1] == ["a", "b"]
    assert list(run(engine)[0]) == ["c"]


def test_kv_from_elsewhere_is_waited_for_aside_and_then_only_the_last_position_is_computed() -> None:
    engine = batcher()
    engine.add(BatchedRequest("far", 8, max_tokens=2, external=8))
    engine.add(BatchedRequest("near", 3, max_tokens=3))
    batch = engine.schedule()
    assert batch.admitted == ("far",)
    assert shown(batch) == {"near": (0, 3)}
    engine.complete(batch)
    assert engine.free_tokens == 400 - 8 - 4
    assert run(engine)[0] == {"near": (3, 1)}
    engine.receive_kv("far", 8)
    assert run(engine) == ({"near": (4, 1), "far": (7, 1)}, ["near", "far"])


def test_what_has_not_come_is_computed() -> None:
    engine = batcher()
    engine.add(BatchedRequest("a", 9, max_tokens=1, external=9))
    assert engine.schedule().admitted == ("a",)
    engine.receive_kv("a", 4)
    assert run(engine) == ({"a": (4, 5)}, ["a"])
    engine.add(BatchedRequest("b", 9, max_tokens=1, external=9))
    engine.receive_kv("b", 0)  # given up before it had room
    assert run(engine) == ({"b": (0, 9)}, ["b"])


def test_the_youngest_loses_its_blocks_and_computes_everything_again() -> None:
    engine = batcher(blocks=4, block_size=4, max_tokens=20)
    engine.add(BatchedRequest("old", 7, max_tokens=9))
    engine.add(BatchedRequest("young", 8, max_tokens=9))
    assert run(engine) == ({"old": (0, 7), "young": (0, 8)}, ["old", "young"])
    batch = engine.schedule()
    assert (shown(batch), batch.preempted) == (
        {"old": (7, 1)},
        ("young",),
    )  # its 8th position fits, young's 9th does not
    engine.complete(batch)
    assert (engine.running, engine.waiting) == (1, 1)
    assert list(run(engine)[0]) == ["old"]  # a third block; young, with 9 tokens by now, would need three as well
    engine.remove("old")
    assert run(engine) == ({"young": (0, 9)}, ["young"])


def test_kv_gets_no_blocks_that_another_prompt_needs() -> None:
    """Else two that wait with parts of their KV could wait for each other."""
    engine = batcher(blocks=5, block_size=4, max_tokens=20)
    engine.add(BatchedRequest("a", 12, max_tokens=1, external=8))
    engine.add(BatchedRequest("b", 12, max_tokens=1, external=12))
    assert engine.schedule().admitted == ("a",)  # three blocks are free, of which a will take one
    engine.receive_kv("a", 8)
    assert run(engine) == ({"a": (8, 4)}, ["a"])
    assert engine.schedule().admitted == ("b",)


def test_a_prompt_is_let_in_when_all_of_it_fits() -> None:
    """Not its first chunk: it would be read, lose its blocks to whoever runs, and be read again."""
    engine = batcher(blocks=6, block_size=4, max_tokens=5)
    engine.add(BatchedRequest("old", 5, max_tokens=3))
    engine.add(BatchedRequest("long", 20, max_tokens=1))
    engine.add(BatchedRequest("short", 1, max_tokens=1))
    for first, tokens in ((0, 5), (5, 1), (6, 1)):
        assert run(engine)[0] == {"old": (first, tokens)}  # the others wait in order
    assert run(engine)[0] == {"long": (0, 5)}


def test_blocks_stay_in_use_until_their_kv_has_been_sent() -> None:
    """A request that is over runs and waits no longer; its blocks are neither free nor taken by others."""
    engine = batcher(blocks=6, block_size=4, max_tokens=20)
    first, second = (
        BatchedRequest("a", 12, max_tokens=1, sends_kv=True),
        BatchedRequest("b", 16, max_tokens=1, sends_kv=True),
    )
    engine.add(first)
    assert run(engine) == ({"a": (0, 12)}, ["a"])
    assert (engine.running, engine.waiting, engine.pending_prefill_tokens, engine.free_tokens) == (0, 0, 0, 12)
    engine.add(second)
    engine.add(BatchedRequest("c", 2, max_tokens=1))
    for _ in range(3):
        assert run(engine) == ({}, [])  # first come, first served: c waits behind b
    assert (engine.running, engine.waiting, engine.pending_prefill_tokens) == (0, 2, 18)
    engine.release_sent(first)
    assert engine.free_tokens == 24
    assert run(engine) == ({"b": (0, 16), "c": (0, 2)}, ["b", "c"])
    assert engine.free_tokens == 8
    engine.release_sent(first)  # again is no matter
    engine.release_sent(second)
    engine.check_integrity()
    assert engine.free_tokens == 24


def test_kv_that_was_sent_before_its_request_is_over_is_not_kept() -> None:
    engine = batcher()
    sequence = BatchedRequest("a", 4, max_tokens=2, sends_kv=True)
    engine.add(sequence)
    run(engine)
    engine.release_sent(sequence)
    assert engine.free_tokens == 396
    run(engine)
    assert engine.free_tokens == 400


def test_kv_of_a_forgotten_request_stays_until_nobody_reads_it() -> None:
    engine = batcher(blocks=4, max_tokens=8)
    sequence, other = (
        BatchedRequest("a", 12, max_tokens=1, sends_kv=True),
        BatchedRequest("b", 12, max_tokens=1, sends_kv=True),
    )
    engine.add(sequence)
    engine.add(other)
    run(engine)
    for name in "ab":
        engine.remove(name)
    assert engine.free_tokens == 8  # b had none
    engine.release_sent(other)
    engine.release_sent(sequence)
    engine.check_integrity()
    assert engine.free_tokens == 16


def test_who_runs_gives_way_to_kv_that_is_being_sent() -> None:
    """As in vLLM, where what is being sent is not preempted; it is not read again before there is room."""
    engine = batcher(blocks=4, block_size=4, max_tokens=20)
    sequence = BatchedRequest("sent", 8, max_tokens=1, sends_kv=True)
    engine.add(sequence)
    engine.add(BatchedRequest("decodes", 7, max_tokens=4))
    run(engine)
    assert run(engine)[0] == {"decodes": (7, 1)}
    assert engine.schedule().preempted == ("decodes",)
    assert run(engine) == ({}, [])
    engine.release_sent(sequence)
    assert run(engine) == ({"decodes": (0, 9)}, ["decodes"])


def test_a_request_can_be_forgotten_in_any_state() -> None:
    engine = batcher(max_requests=1)
    engine.add(BatchedRequest("runs", 3, max_tokens=3))
    engine.add(BatchedRequest("aside", 3, max_tokens=3, external=3))
    run(engine)
    engine.remove("runs")
    assert engine.schedule().admitted == ("aside",)
    engine.add(BatchedRequest("waits", 3, max_tokens=3))
    for name in ("aside", "waits", "nobody"):
        engine.remove(name)
    engine.check_integrity()
    assert engine.free_tokens == 400
    assert engine.schedule().scheduled == ()


class Times:
    """Step times that show what they were asked for."""

    source = "made up"

    def prefill_s(self, tokens: int, pairs: float) -> float:
        return tokens + pairs / 1000

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        raise AssertionError("one stage has no pipeline")

    def decode_line(self, requests: int) -> DecodeLine:
        return DecodeLine(float(requests), 0.01)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        return 1000.0 + self.prefill_s(tokens, pairs) + self.decode_line(requests).step_s(context)


def test_a_step_takes_what_its_work_takes() -> None:
    a, b = BatchedRequest("a", 10, 1), BatchedRequest("b", 50, 1)
    decode, chunk = ScheduledTokens(a, 30, 1), ScheduledTokens(b, 8, 4)
    assert step_s(Times(), (decode, ScheduledTokens(b, 10, 1))) == pytest.approx(2 + 0.4)
    assert step_s(Times(), (chunk,)) == pytest.approx(4 + chunk_pairs(8, 4) / 1000)
    assert step_s(Times(), (decode, chunk)) == pytest.approx(1000 + 4 + 0.042 + 1 + 0.3)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(13, 30),
    st.integers(1, 24),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_every_request_gets_all_its_tokens_whatever_the_memory(
    asked: list[tuple[int, int, int]], blocks: int, max_tokens: int, max_requests: int, sent_after: int
) -> None:
    """Those that receive no KV send theirs, which takes `sent_after` steps after their end."""
    engine = batcher(blocks=blocks, block_size=4, max_tokens=max_tokens, max_requests=max_requests)
    left = {}
    sending: dict[int, list[BatchedRequest]] = {}
    for number, (prompt, answer, external) in enumerate(asked):
        left[str(number)] = answer
        engine.add(BatchedRequest(str(number), prompt, answer, external=min(external, prompt), sends_kv=not external))
    for step in count():
        assert step < 5000
        batch = engine.schedule()
        assert sum(entry.tokens for entry in batch.scheduled) <= max_tokens
        assert len(batch.scheduled) <= max_requests
        for sequence in engine.complete(batch):
            left[sequence.request] -= 1
            if sequence.is_done:
                sending.setdefault(step + sent_after, []).append(sequence)
        for sequence in sending.pop(step, ()):
            engine.release_sent(sequence)
        for name in batch.admitted:
            engine.receive_kv(name, min(asked[int(name)][2], asked[int(name)][0]) if step % 2 else 0)
        engine.check_integrity()
        if not engine.running and not engine.waiting and not sending:
            break
    assert set(left.values()) == {0}
    assert engine.free_tokens == blocks * 4


def test_an_answer_goes_on_from_any_of_its_tokens() -> None:
    prompt = (5, 9, 2)
    whole = EmulatedAnswer(prompt, vocabulary=50)
    tokens = [whole.next() for _ in range(40)]
    assert all(1 <= token < 50 for token in tokens)
    assert len(set(tokens)) > 10
    for at in (0, 1, 17):
        rest = EmulatedAnswer((*prompt, *tokens[:at]), vocabulary=50)
        assert [rest.next() for _ in range(40 - at)] == tokens[at:]
    other, seeded = EmulatedAnswer((5, 9, 3), vocabulary=50), EmulatedAnswer(prompt, vocabulary=50, seed=1)
    assert [other.next() for _ in range(40)] != tokens
    assert [seeded.next() for _ in range(40)] != tokens
