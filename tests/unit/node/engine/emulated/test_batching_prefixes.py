"""The prefix cache of emulated engines: what is not computed, and room that is shared with requests."""

import random

import pytest

from p2pserve.coordinator.prefixes.block_cache import BlockCache
from p2pserve.node.engine.emulated.batching import Batch, BatchedRequest, Batcher


def batcher(blocks: int = 40, prefixes: BlockCache | None = None) -> Batcher:
    return Batcher(blocks=blocks, block_size=4, max_tokens=64, max_requests=8, prefixes=prefixes)


def request(
    name: str, prompt: int, answer: int = 2, prefix: tuple[int, ...] = (), *, external: int = 0, sends_kv: bool = False
) -> BatchedRequest:
    return BatchedRequest(name, prompt, answer, prefix=prefix, external=external, sends_kv=sends_kv)


def run(engine: Batcher, *requests: BatchedRequest) -> list[Batch]:
    for each in requests:
        engine.add(each)
    batches = []
    while engine.running or engine.waiting:
        batches.append(engine.schedule())
        engine.check_integrity()
        engine.complete(batches[-1])
        engine.check_integrity()
    return batches


def test_a_request_begins_behind_what_is_cached_of_its_prompt() -> None:
    engine = batcher()
    run(engine, request("a", 18, prefix=(1, 2, 3, 4)))
    again = request("b", 18, prefix=(1, 2, 9, 9))
    engine.add(again)
    assert engine.pending_prefill_tokens == 10
    (first, *_) = run(engine)
    assert [(entry.first, entry.tokens) for entry in first.scheduled] == [(8, 10)]
    assert again.cached == 8
    assert engine.free_tokens == 160


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = batcher()
    run(engine, request("a", 17, prefix=(1, 2, 3, 4)))
    (first, *_) = run(engine, request("b", 16, prefix=(1, 2, 3, 4)))
    assert [(entry.first, entry.tokens) for entry in first.scheduled] == [(12, 4)]


def test_what_has_come_from_another_engine_is_cached_as_well() -> None:
    engine = batcher()
    engine.add(request("a", 18, prefix=(1, 2, 3, 4), external=18))
    engine.schedule()
    engine.receive_kv("a", 18)
    run(engine)
    (first, *_) = run(engine, request("b", 18, prefix=(1, 2, 3, 4)))
    assert [(entry.first, entry.tokens) for entry in first.scheduled] == [(16, 2)]


def test_a_prompt_that_cannot_be_admitted_yet_does_not_hold_what_is_cached() -> None:
    engine = batcher(blocks=20)
    run(engine, request("a", 18, prefix=(1, 2, 3, 4)))
    engine.add(request("long", 60, 8))
    engine.complete(engine.schedule())
    waiting = request("b", 30, prefix=(1, 2, 3, 4))
    engine.add(waiting)
    engine.complete(engine.schedule())
    engine.check_integrity()
    assert (engine.waiting, waiting.shared, waiting.computed) == (1, [], 0)
    run(engine)


def test_kv_that_is_sent_keeps_what_it_uses_of_the_cache() -> None:
    cache = BlockCache()
    engine = batcher(prefixes=cache)
    sent = request("a", 16, 1, prefix=(1, 2, 3, 4), sends_kv=True)
    engine.add(sent)
    engine.complete(engine.schedule())
    assert (cache.used, cache.unused) == (3, 0)
    engine.check_integrity()
    engine.release_sent(sent)
    assert (cache.used, cache.unused, engine.free_tokens) == (0, 3, 160)


@pytest.mark.parametrize("seed", range(10))
def test_no_block_is_lost_or_held_twice(seed: int) -> None:
    rng = random.Random(seed)
    cache = BlockCache()
    engine = batcher(blocks=rng.choice((24, 40, 80)), prefixes=cache)
    sending, cached = list[BatchedRequest](), 0
    for number in range(300):
        if rng.random() < 0.5:
            prompt = rng.randrange(4, 60)
            prefix = tuple(100 * depth + rng.randrange(2) for depth in range(prompt // 4))
            external = rng.choice((0, 0, prompt))
            work = request(f"r{number}", prompt, rng.randrange(1, 12), prefix, external=external)
            work.sends_kv = not external and rng.random() < 0.3
            engine.add(work)
            sending += [work] if work.sends_kv else []
        batch = engine.schedule()
        engine.check_integrity()
        cached += sum(entry.first == entry.sequence.cached > 0 for entry in batch.scheduled)
        for name in batch.admitted:
            engine.receive_kv(name, rng.randrange(60))
        if rng.random() < 0.1:
            engine.remove(f"r{number - rng.randrange(5)}")
        else:
            engine.complete(batch)
        if sending and rng.random() < 0.5:
            engine.release_sent(sending.pop(0))
        engine.check_integrity()
    assert cached > 0


def test_what_is_cached_and_only_to_be_sent_waits_for_no_prompt() -> None:
    engine = batcher(blocks=100)
    run(engine, request("a", 18, prefix=(1, 2, 3, 4)))
    engine.add(request("long", 150))
    engine.complete(engine.schedule())
    engine.add(request("other", 20))
    engine.add(request("sent", 17, 1, (1, 2, 3, 4), sends_kv=True))
    engine.add(request("computed first", 17, 1, (1, 2, 8, 9), sends_kv=True))
    batches = run(engine)
    steps = [{entry.sequence.request: entry.tokens for entry in batch.scheduled} for batch in batches]
    assert steps[0] == {"long": 63, "sent": 1}
    assert steps[1] == {"long": 23, "other": 20, "computed first": 9}


def test_a_short_prompt_of_which_nothing_is_cached_waits_its_turn_although_it_is_only_to_be_sent() -> None:
    engine = batcher(blocks=100)
    engine.add(request("long", 150))
    engine.complete(engine.schedule())
    engine.add(request("other", 20))
    engine.add(request("sent", 2, 1, sends_kv=True))
    batches = run(engine)
    steps = [{entry.sequence.request: entry.tokens for entry in batch.scheduled} for batch in batches]
    assert steps[0] == {"long": 64}
    assert steps[1] == {"long": 22, "other": 20, "sent": 2}
