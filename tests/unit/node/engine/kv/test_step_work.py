"""What several workers say of one load: the one that is behind counts."""

from p2pserve.node.engine.kv.step_work import LoadedPart, LoadProgress


def test_of_several_workers_the_one_that_is_behind_counts() -> None:
    ahead = LoadProgress({"a": LoadedPart(0.9, 10), "b": LoadedPart(0.5, 5)})
    behind = LoadProgress({"a": LoadedPart(0.4, 20), "c": LoadedPart(0.1, 1)})
    expected = {"a": LoadedPart(0.4, 10), "b": LoadedPart(0.5, 5), "c": LoadedPart(0.1, 1)}
    assert ahead.aggregate(behind).arrived == behind.aggregate(ahead).arrived == expected
    assert ahead.arrived["a"] == LoadedPart(0.9, 10)  # what a worker has said is not changed


def test_nothing_to_say_is_nothing() -> None:
    assert not LoadProgress()
    assert LoadProgress({"a": LoadedPart(0.0, 0)})
