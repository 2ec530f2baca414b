"""`p2pserve plan` and `p2pserve sim`: what they print, and what they say of wrong input."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.planning.model.problem import Problem, Proposal
from p2pserve.coordinator.planning.upper.trials import TrialOutcome
from p2pserve.node.models import BUNDLED
from p2pserve.sdk.actions.plan import count_trials
from p2pserve.sdk.cli import main
from p2pserve.sdk.options.planning import PLACEMENTS, SPECS
from p2pserve.sims.results.trials import SimulatedTrial

CLUSTER = ["--cluster", "thunderserve-8xa100"]
SERVICE = ["--model", "llama-30b", "--workload", "conversation", "--rate", "2"]
NONE, TWO = ["--trials", "0"], ["--trials", "2"]
"""Fewer than by default, which takes longer."""


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan as JSON, made once."""
    from contextlib import redirect_stdout

    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file):
        assert main(["plan", *CLUSTER, *SERVICE, *TWO, "--format", "json"]) == 0
    return path


def test_the_parser_knows_every_column() -> None:
    assert set(SPECS) == {specs.value for specs in Specs} - {Specs.ENGINE.value}


def test_a_plan_for_programs(planned: Path) -> None:
    found = json.loads(planned.read_text(encoding="utf-8"))
    (service,) = found["services"]
    assert found["gpus"] == 8
    assert found["specs"] == "measured"
    assert service["lengths"] == "Azure 2023 conversation"
    assert 0.9 < found["attainment"] <= 1.0
    assert service["max_rate"] > 2
    assert service["ttft_s"]["p50"] <= service["ttft_s"]["p99"] if isinstance(service["ttft_s"], dict) else True
    assert sum(pair["weight"] for pair in service["plan"]["pairings"]) == pytest.approx(1.0)
    gpus = sum(stage["tp"] for replica in service["plan"]["replicas"] for stage in replica["stages"])
    assert gpus <= 8


def test_plans_are_tried_with_lengths_that_are_drawn_evenly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of some hundred drawn by chance, the few longest decide who is best at strict deadlines."""
    tried: list[Problem] = []

    class Trial(SimulatedTrial):
        def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
            assert self.is_even
            tried.append(self.problem)
            return TrialOutcome(1.0, 1.0)

    monkeypatch.setattr("p2pserve.sdk.actions.plan.SimulatedTrial", Trial)
    brief = ["--budget-s", "0.2", "--trials", "1", "--format", "json"]
    assert main(["plan", *CLUSTER, *SERVICE, *brief]) == 0
    assert len(tried) == len(json.loads(capsys.readouterr().out)["trials"]) > 0


def test_the_same_seed_gives_the_same_plan(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CLUSTER, *SERVICE, *TWO, "--format", "json"]) == 0
    first, again = json.loads(planned.read_text(encoding="utf-8")), json.loads(capsys.readouterr().out)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}


def test_the_best_plans_are_simulated_and_the_first_of_them_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CLUSTER, *SERVICE, "--budget-s", "0.2", "--trials", "2", "--format", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    plan, best = made["services"][0]["plan"], made["trials"][0]
    counts = [sum(one["phase"] == phase for one in plan["replicas"]) for phase in ("prefill", "decode", "mixed")]
    assert best["replicas"] == " ".join(f"{count}{name}" for count, name in zip(counts, "PDM", strict=True) if count)
    assert any(one["colocated"] for one in made["trials"])
    for one in made["trials"]:
        assert one["simulated"]["capacity"] == pytest.approx(one["estimated"]["capacity"], rel=0.35)
    (service,) = made["services"]
    assert service["simulated_requests"] == pytest.approx(2000, rel=0.1), "others than those of the trials"
    assert service["attainment"] == pytest.approx(best["simulated"]["attainment"], abs=0.03)
    assert service["attainment"] != best["estimated"]["attainment"]
    assert plan["why"][0].startswith(f"{service['attainment']:.1%} of 2 requests/s are expected to be in time")
    assert main(["plan", *CLUSTER, *SERVICE, "--budget-s", "0.2", "--trials", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "simulated, the best first: " in text
    assert f"expected by {service['simulated_requests']:,} simulated requests, not measurements" in text


def test_kv_in_8_bits_where_that_is_asked_for(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = ["--budget-s", "0.2", "--trials", "0", "--kv-cache-dtype"]
    assert main(["plan", *CLUSTER, *SERVICE, *brief, "fp8"]) == 0
    assert "in 8 bits in memory" in capsys.readouterr().out
    assert main(["plan", *CLUSTER, *SERVICE, *brief, "fp8", "--format", "json"]) == 0
    eight = tmp_path / "eight.json"
    eight.write_text(capsys.readouterr().out, encoding="utf-8")
    (found,), (before,) = (json.loads(path.read_text(encoding="utf-8"))["services"] for path in (eight, planned))
    assert (found["kv_value_bytes"], before["kv_value_bytes"]) == (1, 2)
    assert found["slo"] == before["slo"]
    for path, kept, wanted in ((eight, "8", "fp8"), (planned, "16", "auto")):
        other = "auto" if wanted == "fp8" else "fp8"
        simulate = ["sim", *CLUSTER, *SERVICE, "--plan", str(path), "--count", "20", "--format", "json"]
        assert main([*simulate, "--kv-cache-dtype", other]) == 2
        assert f"is for KV kept in {kept} bits; give --kv-cache-dtype {wanted}" in capsys.readouterr().err
        assert main([*simulate, "--kv-cache-dtype", wanted]) == 0
        assert json.loads(capsys.readouterr().out)["simulated"]


def test_8_bits_are_chosen_where_their_quality_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    brief = ["--budget-s", "0.2", "--trials", "0", "--kv-cache-dtype", "choose"]
    assert main(["plan", *CLUSTER, *SERVICE, *brief]) == 0
    text = capsys.readouterr().out
    assert "KV of llama-30b is kept in 16 bits: what 8 cost in quality is not known for it" in " ".join(text.split())
    assert "in 8 bits in memory" not in text
    bundled = ["--model", str(BUNDLED), "--workload", "conversation", "--rate", "2"]
    assert main(["plan", *CLUSTER, *bundled, *brief]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "in 8 bits in memory" in text
    assert "KV of bundled is kept in 8 bits: perplexity +" in text


def test_a_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CLUSTER, *SERVICE, *NONE]) == 0
    text = capsys.readouterr().out
    for part in (
        "8 GPUs in 1 box, $14.02/h",
        "estimates, not measurements",
        "TTFT",
        "why: ",
        "limit: ",
        "attainment",
    ):
        assert part in text


def test_a_plan_is_explained(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CLUSTER, *SERVICE, *NONE, "--explain"]) == 0
    text = capsys.readouterr().out
    for part in ("  GPUs  ", "Instead ", "  limit  ", "the GPUs that together hold one copy", "  goodput  ", "Here: "):
        assert part in text
    assert main(["plan", *CLUSTER, *SERVICE, *TWO, "--explain", "--format", "json"]) == 0
    (service,) = json.loads(capsys.readouterr().out)["services"]
    explained = service.pop("explain")
    assert [each["id"] for each in explained["replicas"]] == [each["id"] for each in service["plan"]["replicas"]]
    assert {"replica", "TTFT", "attainment"} <= {each["word"] for each in explained["words"]}
    assert service == json.loads(planned.read_text(encoding="utf-8"))["services"][0], "explaining changes no plan"


def test_a_plan_is_simulated(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, trace = tmp_path / "requests.csv", tmp_path / "trace.json"
    code = main(["sim", *CLUSTER, *SERVICE, "--plan", str(planned), "--seconds", "60", "--format", "json",
                 "--requests", str(requests), "--chrome-trace", str(trace)])  # fmt: skip
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    (service,) = found["services"]
    assert found["simulated"] is True
    assert service["completed"] == service["requests"] > 60
    assert service["lengths"] == "Azure 2023 conversation"
    assert service["arrivals"].startswith("Poisson")
    assert len(requests.read_text(encoding="utf-8").splitlines()) == service["requests"] + 1
    assert json.loads(trace.read_text(encoding="utf-8"))


def test_a_lost_box_leaves_its_requests_undone(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", *CLUSTER, *SERVICE, "--plan", str(planned), "--seconds", "60", "--format", "json"]
    assert main([*arguments, "--lose", "a100@30"]) == 0
    (service,) = json.loads(capsys.readouterr().out)["services"]
    assert 0 < service["completed"] < service["requests"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (CLUSTER, "model: give --model and --workload and --rate, or --services FILE"),
        (SERVICE, "cluster: give --cluster FILE, or --live for the running network"),
        ([*SERVICE, "--cluster", "x"], "cluster 'x' is neither a file nor one of cronus-a100-a10"),
        ([*SERVICE, "--cluster", "x.json"], "cluster: x.json cannot be read: No such file or directory"),
        ([*CLUSTER, *SERVICE, "--model", "llama-31b"], "model 'llama-31b' is not known"),
        ([*CLUSTER, *SERVICE, "--workload", "x"], "workload: 'x' is neither a file nor one of coding, conversation"),
        ([*CLUSTER, *SERVICE, "--rate", "nan"], "rate is nan; it must be above 0"),
        ([*CLUSTER, *SERVICE, "--slo", "fast"], "slo: 'fast' is neither like 5x nor like ttft=2"),
        ([*CLUSTER, *SERVICE, "--pin", "x=prefill"], "box 'x' of --pin or --exclude is not in the cluster: a100"),
        ([*CLUSTER, *SERVICE, "--pin", "a100=fast"], "pin: 'a100=fast' is not like BOX=prefill"),
        ([*CLUSTER, *SERVICE, "--pin", "a100=prefill"], "nobody decodes"),
        ([*CLUSTER, *SERVICE, "--pin", "a100=mixed", "--pin", "a100=decode"], "pinned to mixed and to decode"),
        ([*CLUSTER, *SERVICE, "--pin", "a100=mixed", "--exclude", "a100"], "box a100 is excluded as well"),
        ([*CLUSTER, *SERVICE, "--exclude", "a100"], "every box of the cluster is excluded"),
        ([*CLUSTER, *SERVICE, "--price-weight", "-1"], "price-weight: -1.0 is not a number from 0 up"),
        ([*CLUSTER, *SERVICE, "--budget-s", "0"], "--budget-s: 0 is not a number above 0"),
        (["--cluster", "thunderserve-2xa5000", *SERVICE], "the cluster does not hold llama-30b"),
        ([*CLUSTER, *SERVICE, "--services", "x"], "model: it is in the file of --services already"),
        ([*CLUSTER, "--services", "x"], "services: x cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("p2pserve: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--batch-tokens", "512"], "batch-tokens: give --batch-tokens with --measured; --compat keeps to the"),
        (["--compat", "splitwise", "--max-preemptions", "2"], "max-preemptions: give --max-preemptions with"),
        (["--compat", "splitwise", "--setup", "HH"], "model: give --model and --workload and --trace with"),
        (["--compat", "splitwise", "--setup", "HH", "--model", "llama2-70b", "--workload", "conv", "--trace", "x"],
         "x: No such file or directory"),
        ([*CLUSTER, *SERVICE, "--plan", "x"], "plan: x cannot be read"),
        ([*CLUSTER, *SERVICE, "--plan", str(Path(__file__))], "is not what `p2pserve plan --format json` prints"),
        ([*CLUSTER, *SERVICE, "--lose", "x@3"], "lose: 'x@3' is not like BOX@60"),
        ([*CLUSTER, *SERVICE, "--lose", "a100@x"], "lose: 'x' in 'a100@x' is not a number of seconds"),
        ([*CLUSTER, *SERVICE, "--count", "5", "--seconds", "5"], "count: give either --count or --seconds"),
        ([*CLUSTER, *SERVICE, "--arrivals", "recorded"], "arrivals: `recorded` needs a file of requests"),
        ([*CLUSTER, *SERVICE, "--requests", "/nowhere/x.csv"], "/nowhere is no folder; make it first"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_said_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_services_of_several_models_share_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "services.json"
    entry = {"model": "llama-7b", "workload": "coding", "rate": 1}
    file.write_text(json.dumps([{"name": "a", **entry}, {"name": "b", **entry, "model": "llama-13b"}]))
    assert main(["plan", "--cluster", "thunderserve-16xa5000", "--services", str(file), *NONE, "--format", "json"]) == 0
    services = json.loads(capsys.readouterr().out)["services"]
    assert [service["service"] for service in services] == ["a", "b"]
    boxes = [{(s["peer"], s["first_gpu"]) for r in service["plan"]["replicas"] for s in r["stages"]}
             for service in services]  # fmt: skip
    assert boxes[0].isdisjoint(boxes[1])
    together = sum(service["attainment"] * service["rate"] for service in services)
    assert services[0]["score"][1] == pytest.approx(together / sum(service["rate"] for service in services))
    file.write_text(json.dumps([{"name": "a", **entry}, {"name": "a", **entry}]))
    assert main(["plan", *CLUSTER, "--services", str(file)]) == 2
    assert "each with a name of its own" in capsys.readouterr().err


def test_help_says_which_command_looks_at_the_running_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--help"]) == 0
    assert "plan --live" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("asked", "gpus", "budget_s", "tried"),
    [
        (None, 32, None, 4),
        (None, 33, None, 2),
        (None, 128, None, 2),
        (None, 129, None, 0),
        (None, 8, 1.0, 0),
        (2, 900, 1.0, 2),
        (0, 8, None, 0),
    ],
)
def test_small_clusters_have_their_best_plans_simulated(
    asked: int | None, gpus: int, budget_s: float | None, tried: int
) -> None:
    assert count_trials(asked, gpus, budget_s) == tried


@pytest.mark.parametrize("policy", PLACEMENTS)
def test_services_are_placed_on_a_described_cluster(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = tmp_path / "services.json"
    entries = [
        {"name": "chat", "model": "llama-7b", "workload": "conversation", "rate": 2},
        {"name": "code", "model": "llama-30b", "workload": "coding", "rate": 0.5},
    ]
    services.write_text(json.dumps(entries), encoding="utf-8")
    wanted = ["plan", *CLUSTER, "--services", str(services), "--placement", policy, "--budget-s", "3"]
    assert main([*wanted, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    planned = {plan["service"] for plan in found["plans"]}
    assert {name for engine in found["engines"] for name in engine["services"]} | planned == {"chat", "code"}
    assert sum(engine["gpus"] for engine in found["engines"]) <= 8
    assert found["services"].keys() == {"chat", "code"}
    assert found["attainment"] > 0.9
    assert main(wanted) == 0
    assert "latency / time alone" in capsys.readouterr().out


def test_a_model_that_no_box_holds_is_placed_over_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = tmp_path / "services.json"
    entries = [
        {"name": "chat", "model": "llama-7b", "workload": "conversation", "rate": 1},
        {"name": "huge", "model": "bloom-176b", "workload": "coding", "rate": 0.05, "slo": "ttft=9,tpot=9,e2e=99"},
    ]
    services.write_text(json.dumps(entries), encoding="utf-8")
    wanted = ["plan", "--cluster", "thunderserve-cloud-32", "--services", str(services), "--placement", "default"]
    assert main([*wanted, "--format", "json", "--budget-s", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "engines within boxes" not in found["tried"]
    plans = {plan["service"]: plan for plan in found["plans"]}
    assert any(len({stage["peer"] for stage in each["stages"]}) > 1 for each in plans["huge"]["replicas"])
    served = {name for engine in found["engines"] for name in engine["services"]} | plans.keys()
    assert served == {"chat", "huge"}


def test_what_cannot_be_placed_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = tmp_path / "services.json"
    entry = {"name": "large", "model": "bloom-176b", "workload": "coding", "rate": 1, "slo": "ttft=9,tpot=9,e2e=99"}
    services.write_text(json.dumps([entry]), encoding="utf-8")
    cluster = ["--cluster", "thunderserve-cloud-32"]
    for arguments, fault in (
        ([*CLUSTER, *SERVICE], "placement: it is about several services: give --services FILE"),
        ([*cluster, "--services", str(services)], "services: large have no room together on 32 GPUs"),
        ([*cluster, "--services", str(services), "--pin", "a40=prefill"], "pin: engines within boxes do both phases"),
        (["--live"], "placement: it is for a described cluster"),
    ):
        assert main(["plan", *arguments, "--placement", "seallm"]) == 2
        assert fault in capsys.readouterr().err
