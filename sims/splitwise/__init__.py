"""The public Splitwise simulator's rules, reproduced, and the same with what was measured put
right.

    trace = read_trace(Path("conv_130.csv"))
    result = run_setup("HH", "llama2-70b", "conv", trace, mode="released")  # or "measured"
    write_requests_csv(result.outcomes, Path("requests.csv"))

What cannot be raises `SetupError` or `TraceError`, each with one line for the user.
`python -m p2pserve.sims.splitwise check` holds all of it against figures of the public simulator;
`... measured` shows what changes with measured decode times.
"""

from .metrics import missed_slos, slowdowns, summary
from .run import MachineUse, SplitwiseResult, run_setup, write_requests_csv
from .setups import MODELS, SETUPS, WORKLOADS, SetupError
from .step_lookup import Mode
from .traces import azure_trace, draw_trace, read_trace, write_trace

__all__ = [
    "MODELS",
    "SETUPS",
    "WORKLOADS",
    "MachineUse",
    "Mode",
    "SetupError",
    "SplitwiseResult",
    "azure_trace",
    "draw_trace",
    "missed_slos",
    "read_trace",
    "run_setup",
    "slowdowns",
    "summary",
    "write_requests_csv",
    "write_trace",
]
