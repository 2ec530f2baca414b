"""What a contest asks for, and what it makes of the answers."""

from itertools import pairwise
from pathlib import Path

import pytest

from p2pserve.coordinator.prefixes.fetching import LEAST_TOKENS
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel
from p2pserve.sdk.contest.command import main
from p2pserve.sdk.contest.page import write_contest_page
from p2pserve.sdk.contest.report import ContestReport, compare_policies, count_prefixes, describe_report
from p2pserve.sdk.contest.running import ContestAnswer
from p2pserve.sdk.contest.workloads import ASKED, FILE_CHARACTERS, draw_requests, read_sources
from p2pserve.sdk.errors import UsageError

TEXT = read_sources()
BLOCK_TOKENS = 128  # of vLLM's engines on a CPU


def answer(
    ttft_s: float,
    tokens: tuple[int, ...] = (1, 2),
    *,
    at: float = 0.0,
    cached: int = 0,
    fetched: bool = False,
    late: bool = False,
) -> ContestAnswer:
    return ContestAnswer(
        asked_at=at, ttft_s=ttft_s, tpot_s=0.05, e2e_s=1.0, prompt_tokens=100, cached_tokens=cached,
        moved_bytes=2_000_000 * fetched, fetched=fetched, late=late, tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["alone", "files"])
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


def test_prompts_in_turn_are_about_one_file_after_the_other_a_second_apart() -> None:
    turns = draw_requests("turns", TEXT, requests=12, rate=4.0, seed=0)
    begun = [one.prompt[:FILE_CHARACTERS] for one in turns]
    assert [begun.count(each) for each in begun] == [ASKED] * 12
    assert len({each[:100] for each in begun}) == 3
    assert len({one.prompt for one in turns}) == 12
    assert [one.at for one in turns] == pytest.approx([number + 1.0 for number in range(12)])


@pytest.mark.parametrize("name", ["files", "turns"])
def test_beginnings_are_long_enough_to_be_fetched_and_prompts_short_enough_for_the_model(name: str) -> None:
    text = TextModel(BUNDLED)
    for one in draw_requests(name, TEXT, requests=120, rate=4.0, seed=0):
        held = len(text.encode(one.prompt[:FILE_CHARACTERS])) // BLOCK_TOKENS * BLOCK_TOKENS
        assert held >= LEAST_TOKENS
        assert len(text.encode(one.prompt)) + one.max_tokens <= 2048


def test_nothing_is_drawn_of_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="none of alone, files, turns"):
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
    assert [row.other_tokens for row in rows] == [0, 1]
    assert [(row.cached, row.moved_mb) for row in rows] == [(0.25, 2.0), (0.1, 0.0)]
    report = ContestReport(
        boxes=2,
        rounds=1,
        requests=2,
        rate=1.0,
        seed=0,
        rows=tuple(rows),
        prefixes=(),
        cores_busy=1.5,
        cores_ours=1.0,
        alike=False,
    )
    lines = describe_report(report)
    assert lines[-1].startswith("1 answers differ")
    assert all(len(line) <= 80 for line in lines), [line for line in lines if len(line) > 80]


def test_a_fetch_while_all_wait_is_not_held_against_prompts_that_came_alone() -> None:
    """A box stands still for six seconds: then queues are long, and prefixes are fetched because of them."""
    stalled = [answer(6.0, at=3.0), *(answer(8.0 - at, at=at, cached=90, fetched=True) for at in (4.0, 5.0, 6.0))]
    rounds = [[answer(0.5), answer(0.2, at=1.0, cached=90, fetched=True), answer(0.1, at=2.0, cached=80), *stalled]]
    (row,) = count_prefixes("turns", {"plan": rounds})
    assert (row.fetched, row.behind_others) == (4, 3)
    assert (row.computed_ttft_s, row.found_ttft_s, row.fetched_ttft_s) == pytest.approx((3.25, 0.1, 0.2))
    (row,) = count_prefixes("turns", {"plan": [stalled]})
    assert row.fetched_ttft_s is None


def test_prompts_are_counted_by_where_their_beginnings_were(tmp_path: Path) -> None:
    rounds = [
        [
            answer(0.5), answer(0.2, at=1.0, cached=90, fetched=True), answer(0.1, at=2.0, cached=80),
            answer(0.9, at=3.0, late=True),
        ],
        [
            answer(0.7), answer(0.4, at=1.0, cached=90, fetched=True), answer(0.1, at=2.0, cached=80),
            answer(0.1, at=3.0, cached=80),
        ],
    ]  # fmt: skip
    (row,) = count_prefixes("turns", {"plan": rounds})
    assert (row.computed, row.found, row.fetched, row.late) == (2, 3, 2, 1)
    assert (row.computed_ttft_s, row.found_ttft_s, row.fetched_ttft_s) == pytest.approx((0.6, 0.1, 0.3))
    assert row.fetched_mb == 4.0
    assert count_prefixes("alone", {"plan": [[answer(0.5)]]}) == []

    rows = compare_policies("turns", {"plan": rounds})
    report = ContestReport(
        boxes=2,
        rounds=2,
        requests=4,
        rate=1.0,
        seed=0,
        rows=tuple(rows),
        prefixes=(row,),
        cores_busy=1.5,
        cores_ours=1.0,
        alike=True,
    )
    assert "turns plan                2    600     3    100     2    300     1    4.0" in describe_report(report)
    assert all(len(line) <= 80 for line in describe_report(report))
    page = write_contest_page(report, tmp_path).read_text("utf-8")
    assert "600 ms with a prompt that is computed, 300 ms with its beginning fetched (2.0 MB each)" in " ".join(
        page.split()
    )
    assert "fetches nothing here" not in page
    assert "Of 8 answers, 0 differ" in page
    assert (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--policies", "plan,fastest"], "error: policies: fastest; there are predicted,"),
        (["--policies", ""], "error: policies: none; there are predicted,"),
        (["--boxes", "0"], "error: boxes: 0 is not between 1 and 16"),
        (["--rounds", "0"], "error: rounds: give at least 1"),
        (["--rate", "0"], "error: requests, rate: 40 at 0 a second is nothing to ask for"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(line)
