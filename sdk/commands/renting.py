"""`p2pserve rent`: what to rent. Running it imports the planner, with scipy."""

from __future__ import annotations

from types import SimpleNamespace

from ..options.command import command
from ..options.renting import rent_options


@command(
    "rent",
    example=[
        "vastai search offers 'cuda_max_good>=13' --raw > offers.json",
        "p2pserve rent --offers offers.json --budget 13.5/h \\\n      --model llama-30b --slo ttft=2s,tpot=100ms",
        "p2pserve rent --offers offers.json --budget 6/h --model llama-30b \\\n      --rate 1.5 --scripts rented",
    ],
    formats=("table", "json"),
)
@rent_options
def rent(arguments: SimpleNamespace) -> int:
    from ..rent.rent import run_rent

    return run_rent(arguments)
