"""How far an engine is while several workers load it: never back, and never further than the slowest."""

from __future__ import annotations

import random

from p2pserve.node.engine.protocol import Starting
from p2pserve.node.replica.loading import LoadingWorkers, describe_starting


def steps(worker: int, workers: int, files: int) -> list[Starting]:
    """What a worker says."""
    begun = [
        Starting(part="weights", file=file + 1, files=files, worker=worker, workers=workers) for file in range(files)
    ]
    return [*begun, Starting(part="warm-up", worker=worker, workers=workers)]


def shown(said: list[Starting]) -> list[str]:
    workers = LoadingWorkers()
    return [describe_starting(workers.take(each)) for each in said]


def test_one_worker_is_shown_as_it_says() -> None:
    assert shown(steps(0, 1, 3)) == ["weights 1/3", "weights 2/3", "weights 3/3", "warms up"]
    assert shown(steps(0, 1, 1)) == ["weights", "warms up"]


def test_the_engine_is_as_far_as_the_slowest_also_when_that_one_has_said_nothing() -> None:
    fast, slow = steps(1, 2, 2), steps(0, 2, 2)
    assert shown(fast) == ["weights 1/2", "weights 1/2", "weights 1/2"]
    assert shown(fast + slow) == [*["weights 1/2"] * 4, "weights 2/2", "warms up"]


def test_it_never_goes_back_however_the_workers_mix() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        left = [steps(worker, 4, 5) for worker in range(4)]
        said = []
        while any(left):
            said.append(rng.choice([own for own in left if own]).pop(0))
        reached = shown(said)
        order = [*(f"weights {file}/5" for file in range(1, 6)), "warms up"]
        assert reached == sorted(reached, key=order.index)
        assert (reached[0], reached[-1]) == (order[0], order[-1])
        assert "warms up" not in reached[:-1]
