"""Experiments from end to end, cut short, and what their pages are made of."""

import json
from pathlib import Path

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.cluster import Cluster
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.model.problem import Solution
from p2pserve.sims.experiments.__main__ import EXPERIMENTS, main
from p2pserve.sims.experiments.deployments import papers_solution
from p2pserve.sims.experiments.headline import headline
from p2pserve.sims.experiments.links import link_rows
from p2pserve.sims.experiments.page import Curves, Page, PageTable, Picture, ResultRow, write_index, write_page
from p2pserve.sims.experiments.recovery import ANSWERS, DEAD_S, answer_loss, spans_of
from p2pserve.sims.experiments.setting import (
    CLOUD,
    Deployed,
    PlannedCase,
    Scope,
    group,
    highest_rate,
    outcome,
    shapes,
)
from p2pserve.sims.experiments.systems import TRIALS, best_dispatch
from p2pserve.sims.policies import PLAN, SHARES
from p2pserve.sims.replanning import describe_phases
from p2pserve.sims.results.outcomes import attainment


def _each_box_for_itself(cluster: Cluster) -> Solution:
    return tuple(group(cluster, Phase.MIXED, {box.id: box.gpus}) for box in cluster.boxes)


class Pair(ResultRow, frozen=True):
    """A row to print."""

    what_it_is: str
    seconds: float
    line: list[int]


def a_page(**changes: object) -> Page:
    rows = [Pair(what_it_is="a", seconds=0.123456, line=[1]), Pair(what_it_is="b", seconds=1234.5, line=[2])]
    fields = {
        "name": "x",
        "title": "X",
        "assumes": "nothing",
        "tables": (PageTable("T", rows),),
        "remarks": "- it agrees\n",
    }
    return Page(**{**fields, **changes})  # type: ignore[arg-type]


def test_text_of_a_page_is_at_most_100_columns_wide() -> None:
    long = " ".join(["word"] * 60)
    page = a_page(assumes=long, remarks=f"- {long}\n  {long}\n- short\n").markdown()
    assert max(map(len, page.splitlines())) <= 100
    assert f"\n\n{long[:99]}\n" in page
    lines = page.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("- word")))
    assert lines[first + 1].startswith("  word")
    assert lines[-1] == "- short"
    assert page.count("word") == 180


def test_a_page_has_the_table_the_remarks_and_the_command(tmp_path: Path) -> None:
    write_page(a_page(), tmp_path)
    text = (tmp_path / "x.md").read_text()
    assert "| what it is | seconds |\n| --- | --- |\n| a | 0.123 |\n| b | 1234 |" in text
    assert "- it agrees" in text
    assert "python -m p2pserve.sims.experiments x\n" in text
    records = json.loads((tmp_path / "x.json").read_text())
    assert records["tables"]["T"][0] == {"what_it_is": "a", "seconds": 0.123456, "line": [1]}


def test_the_index_names_every_page(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Somebody else's\n\ntext")
    write_page(a_page(), tmp_path)
    for _ in range(2):  # it does not list itself
        write_index(tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert lines[-2:] == ["- [Somebody else's](other.md)", "- [X](x.md)"]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = Curves("x", "y", {"a line": ([0, 1], [1, 2])})
    grid = Picture("q", "four of them", ((curves, curves), (curves, Curves("x", "y", {"a line": ([1, 9], [1, 99])}))))
    write_page(a_page(pictures=(Picture.of("p", curves), grid)), tmp_path)
    for name in ("p.png", "q.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "x.md").read_text()
    assert "![y over x](p.png)" in text
    assert "![four of them](q.png)" in text


def test_a_page_of_another_command_names_that(tmp_path: Path) -> None:
    text = a_page(command="python -m elsewhere x").markdown()
    assert "\n    python -m elsewhere x\n" in text
    assert "p2pserve.sims.experiments" not in text


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["figure-99"])
    assert refused.value.code == 2
    assert "figure-99" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--seeds", "0"), ("--seconds", "-1"), ("--seeds", "two")])
def test_no_seeds_or_seconds_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["links", option, value])
    assert refused.value.code == 2
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_the_scope_is_what_options_say_and_the_page_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes: list[Scope] = []

    def look(scope: Scope) -> Page:
        scopes.append(scope)
        return a_page(name="links", title="Links")

    monkeypatch.setattr("p2pserve.sims.experiments.__main__.EXPERIMENTS", {**EXPERIMENTS, "links": look})
    for options in ([], ["--seeds", "2", "--seconds", "30"], ["--quick", "--seeds", "1"]):
        assert main(["links", "--out", str(tmp_path), *options]) == 0
        command = " ".join(["python -m p2pserve.sims.experiments links", *options])
        assert f"\n    {command}\n" in (tmp_path / "links.md").read_text()
    assert scopes == [Scope(), Scope(seeds=(0, 1), seconds=30.0), Scope.quick()]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["links", "--quick", "--out", str(tmp_path / "file")]) == 1
    assert "experiments: error:" in capsys.readouterr().err


def test_links_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PageTable 5's order: apart over a fast link beats each box for itself, which beats apart over a slow one."""
    assert main(["links", "--quick", "--out", str(tmp_path), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["experiment"] == "links"
    for column in (Specs.TABLE1, Specs.MEASURED):
        rows = {
            (row.link_gbps, row.deployment, row.KV): row.over_baseline
            for row in link_rows(Scope.quick())
            if row.column == column.value
        }
        apart = "A40 prefill, 3090Ti decode"
        assert rows[40, apart, "4 bit"] > 1.1
        assert rows[40, apart, "16 bit"] < rows[40, apart, "4 bit"]
        assert rows[5, apart, "4 bit"] < 0.6
        assert rows[5, "2 A40 + 2 3090Ti each", "4 bit"] > 1.0


def test_the_headline_needs_the_other_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "headline" not in EXPERIMENTS  # it runs nothing
    assert main(["headline", "--out", str(tmp_path)]) == 1
    assert "baselines.json" in capsys.readouterr().err


def test_the_headline_sums_up_the_pages_in_the_repository() -> None:
    page = headline(Path(__file__).resolve().parents[3] / "docs" / "results")
    text = page.markdown()
    for line in ("throughput over HexGen-like, coding", "best prefill:decode, coding | 5:3", "s to plan 32 GPUs | 54"):
        assert line in text


def test_the_papers_plans_are_as_appendix_f_counts_them() -> None:
    cluster = packaged_cluster(CLOUD, Specs.TABLE1)
    for workload, readers in (("coding", 8), ("conversation", 4)):
        solution = papers_solution(cluster, workload)
        used: dict[int, int] = {}
        for part in solution:
            for box, gpus in part.slices:
                used[box] = used.get(box, 0) + gpus
        assert used == {number: box.gpus for number, box in enumerate(cluster.boxes)}
        assert [part.phase for part in solution].count(Phase.PREFILL) == readers
        assert len(solution) == 12


def test_the_highest_rate_is_where_attainment_ends() -> None:
    case = PlannedCase(cluster="thunderserve-h-40gbps", workload="conversation", rate=2.0)
    problem = case.problem()
    scope = Scope(seeds=(0,), seconds=40.0, halvings=4)
    deployed = Deployed(problem, _each_box_for_itself(problem.cluster))
    rate = highest_rate(deployed, scope, 0)
    slo, plan = problem.services[0].slo, deployed.at(rate).plan
    share = [attainment(outcome(problem, plan, scope, 0, rate=at).outcomes, slo) for at in (rate, 2 * rate)]
    assert share[0] >= slo.target > share[1]
    assert describe_phases(plan) == "0P 0D 2M"
    assert set(shapes(plan, problem.cluster)) == set(Phase)


@pytest.mark.parametrize(("by_shares", "better"), [((4.0, 4.5), SHARES), ((4.0, 4.0), PLAN), ((3.0, 4.9), PLAN)])
def test_the_dispatcher_is_the_one_that_carries_more_in_trials(
    by_shares: tuple[float, float], better: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = {PLAN: (5.0, 3.0), SHARES: by_shares}
    monkeypatch.setattr(
        "p2pserve.sims.experiments.systems.highest_rate",
        lambda deployed, scope, seed, dispatch, engine: carried[dispatch][seed - TRIALS],
    )
    problem = PlannedCase(cluster="thunderserve-h-40gbps", workload="coding", rate=0.5).problem()
    deployed = Deployed(problem, _each_box_for_itself(problem.cluster))
    assert best_dispatch(deployed, Scope(seeds=(0, 1))) == better


def test_all_plans_meet_the_same_requests_at_the_same_seed() -> None:
    problem = PlannedCase(cluster="thunderserve-h-40gbps", workload="coding", rate=0.5).problem()
    plan = Deployed(problem, _each_box_for_itself(problem.cluster)).at().plan
    scope = Scope(seconds=20.0)
    first, again, other = (outcome(problem, plan, scope, seed).outcomes for seed in (3, 3, 4))
    assert np.array_equal(first.e2e_s, again.e2e_s)
    assert not np.array_equal(first.trace.arrival_s[:5], other.trace.arrival_s[:5])


def test_a_loss_is_answered_over_time() -> None:
    """One case, cut short: without new plans, with new phases, with new groups that load."""
    problem = PlannedCase(workload="conversation", rate=3.0).problem()
    deployed = Deployed(problem, papers_solution(problem.cluster, "conversation"))
    scope = Scope(seeds=(0,), seconds=50.0, steps=40)
    none, light, restarted = (answer_loss(deployed, 3.0, answer, scope, 0) for answer in ANSWERS[:3])
    before, during, after = spans_of(scope)
    assert [span.span for span in none.spans] == ["before", "during", "after"]
    assert none.records == ()
    assert none.spans[0] == light.spans[0] == restarted.spans[0], "the same requests, the same plan"
    (found,) = light.records
    assert (found.kind, found.asked_s, found.loading) == ("light", before.end_s + DEAD_S, ())
    (found,) = restarted.records
    assert found.kind == "full"
    assert len(found.loading) == sum(int(part[:-1]) for part in found.replicas.split())
    assert found.reload_s > 60.0
    assert restarted.spans[1].attainment < light.spans[1].attainment
    assert after.end_s - during.start_s > found.reload_s
