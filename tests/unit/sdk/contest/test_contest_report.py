"""What a contest asks for, and what it makes of the answers."""

from itertools import pairwise

import pytest

from p2pserve.sdk.contest.command import main
from p2pserve.sdk.contest.report import ContestReport, compare_policies, describe_report
from p2pserve.sdk.contest.running import ContestAnswer
from p2pserve.sdk.contest.workloads import FILE_CHARACTERS, WORKLOADS, draw_requests, read_sources
from p2pserve.sdk.errors import UsageError

TEXT = read_sources()


def answer(ttft_s: float, tokens: tuple[int, ...] = (1, 2), *, cached: int = 0, fetched: bool = False) -> ContestAnswer:
    return ContestAnswer(
        ttft_s=ttft_s, tpot_s=0.05, e2e_s=1.0, prompt_tokens=100, cached_tokens=cached, moved_bytes=2_000_000 * fetched,
        fetched=fetched, tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_asks_for_the_same_again_one_after_the_other(name: str) -> None:
    drawn = draw_requests(name, TEXT, requests=200, rate=4.0, seed=1)
    assert drawn == draw_requests(name, TEXT, requests=200, rate=4.0, seed=1)
    assert drawn != draw_requests(name, TEXT, requests=200, rate=4.0, seed=2)
    assert all(one.at < other.at for one, other in pairwise(drawn))
    assert 35.0 < drawn[-1].at < 65.0


def test_prompts_of_files_share_all_but_their_end_and_others_nothing() -> None:
    files = draw_requests("files", TEXT, requests=200, rate=4.0, seed=0)
    assert len({one.prompt[:FILE_CHARACTERS] for one in files}) == 6
    assert len({one.prompt for one in files}) == 200
    alone = draw_requests("alone", TEXT, requests=200, rate=4.0, seed=0)
    assert len({one.prompt[:100] for one in alone}) > 190


def test_nothing_is_drawn_of_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="none of alone, files"):
        draw_requests("chat", TEXT, requests=1, rate=1.0, seed=0)
    with pytest.raises(UsageError, match="0 at 1 a second"):
        draw_requests("files", TEXT, requests=0, rate=1.0, seed=0)


def test_each_figure_is_the_median_over_rounds_and_beside_the_first_policy() -> None:
    rows = compare_policies(
        "files",
        {
            "plan": [[answer(0.2), answer(0.4)], [answer(0.1), answer(0.1)], [answer(2.0), answer(2.0)]],
            "round-robin": [[answer(0.6), answer(0.6)]] * 3,
        },
    )
    assert [row.ttft_mean_s for row in rows] == pytest.approx([0.3, 0.6])
    assert [row.over_default for row in rows] == pytest.approx([1.0, 2.0])
    assert [row.in_time for row in rows] == [1.0, 1.0]
    assert rows[0].ttft_p99_s == pytest.approx(0.398)


def test_answers_that_differ_and_prefixes_that_came_are_counted() -> None:
    rows = compare_policies(
        "files",
        {
            "plan": [[answer(0.1, (1, 2)), answer(0.1, (3, 4), cached=50, fetched=True)]],
            "round-robin": [[answer(0.1, (1, 2)), answer(0.1, (3, 5), cached=20)]],
        },
    )
    assert [(row.other_tokens, row.fetched) for row in rows] == [(0, 1), (1, 0)]
    assert [(row.cached, row.moved_mb) for row in rows] == [(0.25, 2.0), (0.1, 0.0)]
    report = ContestReport(boxes=2, rounds=1, requests=2, rate=1.0, seed=0, rows=tuple(rows), alike=False)
    lines = describe_report(report)
    assert lines[-1].startswith("1 answers differ")
    assert all(len(line) <= 80 for line in lines), [line for line in lines if len(line) > 80]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--policies", "plan,fastest"], "error: policies: fastest; there are predicted,"),
        (["--policies", ""], "error: policies: none; there are predicted,"),
        (["--boxes", "0"], "error: boxes: 0 is not between 1 and 16"),
        (["--rounds", "0"], "error: rounds: give at least 1"),
        (["--rate", "0"], "error: requests, rate: 60 at 0 a second is nothing to ask for"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(line)
