"""`p2pserve plan`, `sim` and `provision`: what a cluster would do, and of what it should be made."""

from __future__ import annotations

from types import SimpleNamespace

from ..errors import UsageError
from ..options.command import combine, command
from ..options.planning import (
    apply_option,
    explain_option,
    live_option,
    placement_option,
    plan_options,
    sim_options,
    trials_option,
)
from ..options.provision import provision_options
from ..options.shared import network_options, timeout_option


@command(
    "plan",
    example=[
        "p2pserve plan --cluster thunderserve-cloud-32 --model llama-30b \\\n      --workload coding --rate 10",
        "p2pserve plan --live --explain   # why it is as it is, and what the words mean",
    ],
    formats=("table", "json"),
)
@combine(
    plan_options, placement_option, trials_option, explain_option, live_option, apply_option,
    network_options("p2p_client_..."),
    timeout_option,
)  # fmt: skip
def plan(arguments: SimpleNamespace) -> int:
    if arguments.placement is not None:
        if arguments.live:
            raise UsageError("placement: it is for a described cluster; the running network shares no GPU yet")
        from ..simulating.placement import run_placement

        return run_placement(arguments)
    if arguments.live:
        from ..live.plan import run_live_plan

        return run_live_plan(arguments)
    if arguments.apply:
        raise UsageError("apply: only the running network can be changed: give --live, too")
    from ..actions.plan import run_plan  # nothing of the network

    return run_plan(arguments)


@command(
    "sim",
    example="p2pserve sim --cluster thunderserve-cloud-32 --model llama-30b \\\n      --workload coding --rate 3",
    formats=("table", "json"),
)
@sim_options
def sim(arguments: SimpleNamespace) -> int:
    from ..simulating.sim import run_sim

    return run_sim(arguments)


@command(
    "provision",
    example=[
        "p2pserve provision --model llama2-70b --workload coding --rate 70",
        "p2pserve provision --model bloom-176b --workload conversation \\\n      --goal throughput --max-kw 224",
        (
            "p2pserve provision --model llama-7b --workload coding --rate 5 \\\n"
            "      --design 2xA40/1xA40 --slo ttft=9/9/15,tbt=9/9/15,e2e=9/9/15"
        ),
    ],
    formats=("table", "json"),
)
@provision_options
def provision(arguments: SimpleNamespace) -> int:
    from ..simulating.provision import run_provision

    return run_provision(arguments)
