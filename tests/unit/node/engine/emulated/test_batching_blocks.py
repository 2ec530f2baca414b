"""Who holds how many blocks of the emulated engine, block by block: what is let in, what waits, what is taken away."""

import pytest

from p2pserve.node.engine.emulated.batching import Batch, BatchedRequest, Batcher


def batcher(blocks: int, *, max_tokens: int = 50, max_requests: int = 8) -> Batcher:
    """Of blocks of four tokens."""
    return Batcher(blocks=blocks, block_size=4, max_tokens=max_tokens, max_requests=max_requests)


def step(engine: Batcher) -> tuple[dict[str, tuple[int, int]], tuple[str, ...], tuple[str, ...]]:
    """What it computed, and who got blocks or lost them."""
    batch = engine.schedule()
    engine.complete(batch)
    engine.check_integrity()
    return computed(batch), batch.admitted, batch.preempted


def computed(batch: Batch) -> dict[str, tuple[int, int]]:
    return {entry.sequence.request: (entry.first, entry.tokens) for entry in batch.scheduled}


def test_prompt_tokens_yet_to_be_computed_here_are_those_of_requests_without_a_token() -> None:
    engine = batcher(100, max_tokens=10, max_requests=3)
    engine.add(BatchedRequest("decodes", 4, max_tokens=5))
    engine.add(BatchedRequest("prefills", 20, max_tokens=5))
    step(engine)
    engine.add(BatchedRequest("far", 30, max_tokens=5, external=24))
    engine.add(BatchedRequest("waits", 7, max_tokens=5))
    assert engine.pending_prefill_tokens == 20 + (30 - 24) + 7
    assert (engine.running, engine.waiting) == (2, 2)
    # No token is left for others, nor is one needed to be given KV.
    assert step(engine) == ({"decodes": (4, 1), "prefills": (6, 9)}, ("far",), ())
    assert engine.pending_prefill_tokens == 20 + 6 + 7
    assert step(engine) == ({"decodes": (5, 1), "prefills": (15, 5), "waits": (0, 4)}, (), ())
    assert engine.pending_prefill_tokens == 30 - 24 + 7
    assert step(engine)[0] == {"decodes": (6, 1), "prefills": (20, 1), "waits": (4, 3)}
    assert engine.pending_prefill_tokens == 30 - 24
    engine.receive_kv("far", 24)
    assert engine.pending_prefill_tokens == 30


@pytest.mark.parametrize(("answer", "first", "again"), [(1, (7, 1), {}), (2, (7, 1), {"a": (8, 1)})])
def test_the_last_token_is_computed_even_where_all_kv_has_come(
    answer: int, first: tuple[int, int], again: dict[str, tuple[int, int]]
) -> None:
    engine = batcher(10)
    engine.add(BatchedRequest("a", 8, max_tokens=answer, external=8))
    assert step(engine) == ({}, ("a",), ())
    assert engine.free_tokens == 40 - 8
    engine.receive_kv("a", 8)
    assert step(engine)[0] == {"a": first}
    assert step(engine)[0] == again


def test_kv_that_has_come_goes_before_who_waits_longer() -> None:
    engine = batcher(10, max_requests=1)
    engine.add(BatchedRequest("runs", 3, max_tokens=2))
    engine.add(BatchedRequest("far", 8, max_tokens=1, external=8))
    engine.add(BatchedRequest("waits", 3, max_tokens=1))
    step(engine)
    assert step(engine)[0] == {"runs": (3, 1)}
    assert step(engine) == ({"waits": (0, 3)}, ("far",), ())
    engine.add(BatchedRequest("later", 3, max_tokens=1))
    engine.receive_kv("far", 5)
    assert step(engine)[0] == {"far": (5, 3)}
    assert step(engine)[0] == {"later": (0, 3)}


def test_a_prompt_is_let_in_when_exactly_all_of_its_blocks_are_free() -> None:
    for prompt, fits in ((8, True), (9, False)):
        engine = batcher(4)
        engine.add(BatchedRequest("runs", 8, max_tokens=9))
        engine.add(BatchedRequest("next", prompt, max_tokens=1))
        assert ("next" in step(engine)[0]) is fits


@pytest.mark.parametrize(
    ("blocks", "admitted"),
    # half has two blocks for its KV and will need three more; far wants three
    [(2 + 3 + 3, ("far",)), (2 + 3 + 2, ())],
)
def test_kv_gets_blocks_only_beside_all_that_unfinished_prompts_still_need(
    blocks: int, admitted: tuple[str, ...]
) -> None:
    engine = batcher(blocks)
    engine.add(BatchedRequest("half", 20, max_tokens=1, external=8))
    assert step(engine)[1] == ("half",)
    engine.add(BatchedRequest("far", 12, max_tokens=1, external=12))
    assert step(engine)[1] == admitted


def test_one_that_decodes_needs_no_blocks_kept_for_it() -> None:
    """Its prompt is done, so it can be preempted and does not wait for anybody."""
    engine = batcher(5)
    engine.add(BatchedRequest("decodes", 8, max_tokens=9))
    step(engine)
    engine.add(BatchedRequest("far", 12, max_tokens=1, external=12))
    batch = engine.schedule()
    assert batch.preempted == ()
    assert batch.admitted == ()  # two free blocks are left of five, after the third of who decodes
    for free in (6, 7):
        engine = batcher(free)
        engine.add(BatchedRequest("decodes", 8, max_tokens=9))
        step(engine)
        engine.add(BatchedRequest("far", 12, max_tokens=1, external=12))
        assert engine.schedule().admitted == ("far",)


def test_who_runs_alone_takes_the_blocks_of_the_last_that_waits_with_kv() -> None:
    engine = batcher(6, max_requests=1)
    for name in ("one", "two"):
        engine.add(BatchedRequest(name, 8, max_tokens=1, external=8))
    engine.add(BatchedRequest("runs", 8, max_tokens=9))
    assert step(engine) == ({"runs": (0, 8)}, ("one", "two"), ())
    for name in ("one", "two"):
        engine.receive_kv(name, 8)  # now they wait for the only place
    assert step(engine) == ({"runs": (8, 1)}, (), ("two",))
    assert engine.free_tokens == 4
    assert (engine.running, engine.waiting) == (1, 2)
    assert step(engine) == ({"runs": (9, 1)}, (), ())
    engine.remove("runs")
    assert step(engine)[0] == {"one": (7, 1)}  # its KV is still there
    assert step(engine)[0] == {"two": (0, 8)}  # and that of the other is computed here


def test_who_does_not_run_alone_loses_its_own_blocks_before_those_of_who_waits() -> None:
    engine = batcher(6, max_requests=2)
    engine.add(BatchedRequest("far", 8, max_tokens=1, external=8))
    engine.add(BatchedRequest("old", 8, max_tokens=9))
    engine.add(BatchedRequest("young", 7, max_tokens=9))
    assert step(engine) == ({"old": (0, 8), "young": (0, 7)}, ("far",), ())
    engine.receive_kv("far", 8)
    assert step(engine) == ({"old": (8, 1)}, (), ("young",))
    assert (engine.running, engine.waiting) == (1, 2)


def test_an_engine_in_one_step_computes_no_more_than_its_budget_and_lets_nobody_in_after_a_preemption() -> None:
    engine = batcher(4, max_tokens=9)
    engine.add(BatchedRequest("old", 8, max_tokens=9))
    engine.add(BatchedRequest("young", 8, max_tokens=9))
    assert step(engine)[0] == {"old": (0, 8), "young": (0, 1)}
    engine.add(BatchedRequest("short", 1, max_tokens=1))
    assert step(engine) == ({"old": (8, 1)}, (), ("young",))
    assert step(engine)[0] == {"old": (9, 1)}  # young goes first, and needs two blocks of the one that is free


def test_answers_whose_kv_has_come_go_on_beside_a_prompt_that_would_take_all_tokens() -> None:
    engine = batcher(100, max_tokens=10, max_requests=4)
    engine.add(BatchedRequest("prefills", 60, max_tokens=1))
    assert step(engine)[0] == {"prefills": (0, 10)}
    engine.add(BatchedRequest("one", 8, max_tokens=3, external=8))
    engine.add(BatchedRequest("two", 9, max_tokens=3, external=9))
    assert step(engine) == ({"prefills": (10, 10)}, ("one", "two"), ())  # KV may come meanwhile
    engine.receive_kv("two", 9)
    engine.receive_kv("one", 8)
    engine.add(BatchedRequest("later", 5, max_tokens=1))
    assert step(engine)[0] == {"prefills": (20, 8), "two": (8, 1), "one": (7, 1)}
    assert step(engine)[0] == {"prefills": (28, 8), "two": (9, 1), "one": (8, 1)}


def test_a_prompt_whose_kv_has_come_in_part_takes_no_tokens_from_one_under_way() -> None:
    engine = batcher(100, max_tokens=10, max_requests=4)
    engine.add(BatchedRequest("prefills", 25, max_tokens=1))
    engine.add(BatchedRequest("far", 30, max_tokens=3, external=30))
    step(engine)
    engine.receive_kv("far", 4)
    engine.add(BatchedRequest("later", 5, max_tokens=1))
    assert step(engine)[0] == {"prefills": (10, 10)}
    assert step(engine)[0] == {"prefills": (20, 5), "far": (4, 5)}
