"""Where requests come from: measured traces, drawn and made-up ones, and files that users bring."""

from pathlib import Path

import numpy as np
import pytest

from p2pserve.sims.records import TraceError
from p2pserve.sims.workloads import (
    azure,
    begin_alike,
    draw,
    mooncake,
    read_requests,
    replay,
    workload_from,
    workload_of,
)

CONVERSATION = azure("conversation")


@pytest.mark.parametrize(
    ("name", "rows", "rate", "cv", "prompt", "output"),
    [("coding", 8819, 2.57, 13.2, 2048, 27.9), ("conversation", 19366, 5.53, 1.09, 1155, 211)],
)
def test_azures_traces_are_what_is_known_of_them(
    name: str, rows: int, rate: float, cv: float, prompt: float, output: float
) -> None:
    found = azure(name)
    assert len(found.arrival_s) == rows
    assert found.rate == pytest.approx(rate, rel=0.005)
    assert found.gap_cv == pytest.approx(cv, rel=0.01)
    assert found.lengths.prompt.mean() == pytest.approx(prompt, rel=0.001)
    assert found.lengths.output.mean() == pytest.approx(output, rel=0.001)
    with pytest.raises(TraceError, match="none of coding, conversation"):
        azure("chat")


def test_a_replay_keeps_rows_and_stretches_time() -> None:
    trace = replay(CONVERSATION, rate=11.06, seconds=600.0)
    assert trace.arrival_s[-1] < 600.0
    assert (trace.prompt == CONVERSATION.lengths.prompt[: len(trace)]).all()
    assert trace.arrival_s[100] == pytest.approx(CONVERSATION.arrival_s[100] / 2.0, rel=0.001)
    assert trace.arrivals == "as recorded, time scaled to 11.06 requests/s"
    assert replay(CONVERSATION).arrivals == "as recorded"


@pytest.mark.parametrize(("cv", "said"), [(1.0, "Poisson"), (4.0, "CV 4.00"), (0.0, "every 0.05 s")])
def test_drawn_requests_have_the_rate_and_the_burstiness_asked_for(cv: float, said: str) -> None:
    trace = draw(CONVERSATION.lengths, rate=20.0, rng=np.random.default_rng(1), requests=40_000, cv=cv)
    gaps = np.diff(trace.arrival_s)
    assert 1.0 / gaps.mean() == pytest.approx(20.0, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)
    assert said in trace.arrivals
    assert trace.lengths == "Azure 2023 conversation"
    assert workload_of(trace).rate == pytest.approx(20.0, rel=0.06)


def share_seen_before(prefixes: tuple[tuple[int, ...], ...]) -> float:
    """Of all pieces of prompts, those that an earlier one begins with as well."""
    seen: set[int] = set()
    found = 0
    for names in prefixes:
        found += sum(name in seen for name in names)
        seen.update(names)
    return found / sum(map(len, prefixes))


def test_prompts_may_begin_as_those_of_another_trace_do() -> None:
    drawn = draw(CONVERSATION.lengths, rate=20.0, rng=np.random.default_rng(1), requests=3000)
    named = begin_alike(drawn, piece_tokens=64, rng=np.random.default_rng(2))
    assert (named.prompt == drawn.prompt).all()
    assert all(len(names) == prompt // 64 for names, prompt in zip(named.prefixes, drawn.prompt, strict=True))
    before = dict[int, tuple[int, ...]]()
    for names in named.prefixes:  # a piece stands for all of the prompt up to it
        assert all(before.setdefault(name, names[:place]) == names[:place] for place, name in enumerate(names))
    theirs = mooncake(rate=1.0).prefixes
    usual = [share_seen_before(theirs[begin : begin + 3000]) for begin in range(0, 9001, 3000)]
    assert 0.5 * min(usual) < share_seen_before(named.prefixes) < 1.2 * max(usual)
    again = begin_alike(drawn, piece_tokens=64, rng=np.random.default_rng(2))
    assert named.prefixes == again.prefixes
    with pytest.raises(TraceError, match="Mooncake's trace has 12031 requests; 13000 are to begin"):
        begin_alike(
            draw(CONVERSATION.lengths, rate=9.0, rng=np.random.default_rng(1), requests=13_000),
            piece_tokens=64,
            rng=np.random.default_rng(2),
        )


def test_drawn_for_some_seconds() -> None:
    trace = draw(CONVERSATION.lengths, rate=20.0, rng=np.random.default_rng(1), seconds=100.0)
    assert 99.0 < trace.arrival_s[-1] < 100.0
    assert len(trace) == pytest.approx(2000, rel=0.1)
    with pytest.raises(TraceError, match="no request arrives within"):
        draw(CONVERSATION.lengths, rate=0.001, rng=np.random.default_rng(1), seconds=0.001)


def test_same_seed_same_requests() -> None:
    one, two, other = (
        draw(CONVERSATION.lengths, rate=5.0, rng=np.random.default_rng(seed), requests=50) for seed in (3, 3, 4)
    )
    assert one.arrival_s.tobytes() + one.prompt.tobytes() == two.arrival_s.tobytes() + two.prompt.tobytes()
    assert one.prompt.tobytes() != other.prompt.tobytes()


def test_prompt_and_output_are_drawn_together() -> None:
    rows = set(zip(CONVERSATION.lengths.prompt.tolist(), CONVERSATION.lengths.output.tolist(), strict=True))
    trace = draw(CONVERSATION.lengths, rate=5.0, rng=np.random.default_rng(3), requests=2000)
    assert rows.issuperset(zip(trace.prompt.tolist(), trace.output.tolist(), strict=True))
    assert trace.lengths == "Azure 2023 conversation"


@pytest.mark.parametrize("name", ["conversation", "coding"])
def test_an_even_draw_has_as_many_long_ones_as_there_are(name: str) -> None:
    lengths = azure(name).lengths
    rows = set(zip(lengths.prompt.tolist(), lengths.output.tolist(), strict=True))
    even, other = (
        draw(lengths, rate=5.0, rng=np.random.default_rng(seed), requests=1000, is_even=True) for seed in (3, 4)
    )
    assert rows.issuperset(zip(even.prompt.tolist(), even.output.tolist(), strict=True))
    for side in ("prompt", "output"):
        there = getattr(lengths, side)
        for share in (0.5, 0.9, 0.97):
            longer = (getattr(even, side) > np.quantile(there, share)).mean()
            assert longer == pytest.approx((there > np.quantile(there, share)).mean(), abs=0.005)
        assert getattr(even, side).mean() == pytest.approx(there.mean(), rel=0.015)
    assert even.prompt.tolist() != other.prompt.tolist()
    assert np.corrcoef(even.arrival_s, even.prompt)[0, 1] == pytest.approx(0.0, abs=0.1), "in no order"
    few = draw(CONVERSATION.lengths, rate=5.0, rng=np.random.default_rng(3), requests=1, is_even=True)
    assert len(few) == 1


def test_draws_that_cannot_be() -> None:
    rng, lengths = np.random.default_rng(0), CONVERSATION.lengths
    with pytest.raises(TraceError, match="rate is 0"):
        draw(lengths, rate=0.0, rng=rng, requests=5)
    with pytest.raises(TraceError, match="rate is nan"):
        replay(CONVERSATION, rate=float("nan"))
    with pytest.raises(TraceError, match="cv is -1"):
        draw(lengths, rate=1.0, rng=rng, requests=5, cv=-1.0)
    with pytest.raises(TraceError, match="either a number of requests or of seconds"):
        draw(lengths, rate=1.0, rng=rng)
    with pytest.raises(TraceError, match="requests is 0"):
        draw(lengths, rate=1.0, rng=rng, requests=0)


CSV = "arrival,prompt,output,note\n2.5,10,3,x\n0.5,20,4,y\n"
JSONL = '{"arrival": 2.5, "prompt": 10, "output": 3}\n\n{"arrival": 0.5, "prompt": 20, "output": 4}\n'
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,2.5,1,10,3\n1,2,0,0.5,1,20,4\n"
)


@pytest.mark.parametrize(("name", "text"), [("a.csv", CSV), ("a.jsonl", JSONL), ("a.csv", SPLITWISE)])
def test_a_users_requests_in_order_of_arrival(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    trace = read_requests(tmp_path / name)
    assert trace.arrival_s.tolist() == [0.5, 2.5]
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([20, 10], [4, 3])
    assert trace.ids.tolist() == [1, 0]  # rows of the file
    assert trace.lengths == f"{name}, as recorded"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt,output\n10,3\n20,4\n"),
        ("a.jsonl", '{"prompt": 10, "output": 3}\n{"prompt": 20, "output": 4}\n'),
    ],
)
def test_lengths_alone_are_enough_for_a_plan(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    workload = workload_from(tmp_path / name, 2.5)
    assert (workload.prompts.tolist(), workload.outputs.tolist()) == ([10, 20], [3, 4])
    assert (workload.rate, workload.arrival_cv) == (2.5, 1.0)


def test_recorded_arrivals_say_how_requests_crowd(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    assert workload_from(tmp_path / "a.csv", 2.5).arrival_cv == 0.0


def test_an_empty_file_has_no_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,output\n")
    with pytest.raises(TraceError, match="there are no requests in it"):
        workload_from(tmp_path / "a.csv", 2.5)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "arrival,prompt,output\n1,1e300,3\n", "line 2: prompt is 1e\\+300; .* at most 2,147,483,648"),
        (
            "a.csv",
            "arrival,prompt\n1,2\n",
            r"line 1: no column for output \(output or .*\); there are: arrival, prompt",
        ),
        ("a.csv", "", "line 1: no column for arrival .* there are: none"),
        ("a.csv", "arrival,prompt,output\n", "there are no requests"),
        ("a.csv", "arrival,prompt,output\n1,2,3\n4,x,3\n", "line 3: prompt is 'x', which is no number"),
        ("a.csv", "arrival,prompt,output\n1,2\n", "line 2: output is missing"),
        ("a.csv", "arrival,prompt,output\nnan,2,3\n", "line 2: arrival is 'nan'; it must be a finite number"),
        ("a.csv", "arrival,prompt,output\n-1,2,3\n", "line 2: arrival is -1; it must not be negative"),
        ("a.csv", "arrival,prompt,output\n1,0,3\n", "line 2: prompt is 0; it must be a whole number"),
        ("a.csv", "arrival,prompt,output\n1,2,3.5\n", "line 2: output is 3.5; it must be a whole number"),
        ("a.jsonl", '{"arrival": 1, "prompt": 2}\n', "line 1: output is missing"),
        ("a.jsonl", "{}\nnonsense\n", "line 1: arrival is missing"),
        ("a.jsonl", "nonsense\n", "line 1: no JSON"),
        ("a.jsonl", "[1]\n", "line 1: not an object"),
        ("a.jsonl", '{"arrival": 1, "prompt": true, "output": 2}\n', "line 1: prompt is True"),
    ],
)
def test_a_users_mistakes_are_named_with_their_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=said):
        read_requests(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv"):
        read_requests(tmp_path / "none.csv")
