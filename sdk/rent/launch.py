"""The commands by which offers are rented, each box with a join token of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Final, NamedTuple

from ...coordinator.renting.choice import Rental
from ...coordinator.renting.needs import Needs
from ...coordinator.renting.offers import Market, Offer

ONSTART: Final = "onstart.sh"

PORT: Final = 4001

HEAD: Final = """\
#!/bin/bash
# Rents the boxes that `p2pserve rent` found: run it on the box that ran `p2pserve bootstrap`, beside onstart.sh.
# Each box gets a join token that lets one box in, and that ends in a day.
set -euo pipefail
cd "$(dirname "$0")"
new_token() {
    p2pserve token create --uses 1 --expires 1d --name "$1" --format json \\
        | python3 -c 'import json, sys; print(json.load(sys.stdin)["token"])'
}
"""


class Launch(NamedTuple):
    """What every box is started with. `model`: as `p2pserve join --model` takes it."""

    image: str
    model: str
    needs: Needs


def onstart_script() -> str:
    """What a box runs when it boots."""
    return (files(__package__) / ONSTART).read_text(encoding="utf-8")


def rent_commands(offers: Iterable[Offer], launch: Launch) -> list[str]:
    """Lines of a shell: for each box its token, then the market's own command."""
    lines = []
    for offer in offers:
        name = f"{offer.market} {offer.name} {offer.gpus} x {offer.gpu.name}"
        lines.append(f"TOKEN=$(new_token {shlex.quote(name)})")
        lines.append(_vast(offer, launch) if offer.market is Market.VAST else _runpod(offer, launch))
    return lines


def write_scripts(folder: Path, rental: Rental, launch: Launch) -> tuple[Path, Path]:
    """`onstart.sh` and `rent.sh`, both to be run as they are. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    onstart, rent = folder / ONSTART, folder / "rent.sh"
    onstart.write_text(onstart_script(), encoding="utf-8")
    rent.write_text(HEAD + "\n".join(rent_commands(rental.offers, launch)) + "\n", encoding="utf-8")
    for script in (onstart, rent):
        script.chmod(0o755)
    return onstart, rent


def _variables(offer: Offer, launch: Launch) -> dict[str, str]:
    """Of the instance, but for its token."""
    found = {
        "P2PSERVE_JOIN_MODEL": launch.model,
        "P2PSERVE_JOIN_USD_PER_HOUR": f"{offer.hourly_usd(launch.needs.disk_gb(offer)):.4g}",
    }
    if offer.up_gbps is not None and offer.down_gbps is not None:
        found["P2PSERVE_JOIN_UP_GBPS"] = f"{offer.up_gbps:.4g}"
        found["P2PSERVE_JOIN_DOWN_GBPS"] = f"{offer.down_gbps:.4g}"
    if offer.up_usd_per_gb or offer.down_usd_per_gb:
        found["P2PSERVE_JOIN_UP_USD_PER_GB"] = f"{offer.up_usd_per_gb:.4g}"
        found["P2PSERVE_JOIN_DOWN_USD_PER_GB"] = f"{offer.down_usd_per_gb:.4g}"
    return found


def _vast(offer: Offer, launch: Launch) -> str:
    told = " ".join(f"-e {name}={shlex.quote(value)}" for name, value in _variables(offer, launch).items())
    environment = f"-p {PORT}:{PORT} -e P2PSERVE_BOOTSTRAP="
    bid = f" --bid_price {offer.usd_per_hour:.4g}" if offer.interruptible else ""
    return (
        f"vastai create instance {shlex.quote(offer.name)} --image {shlex.quote(launch.image)} "
        f"--disk {_disk(offer, launch)}{bid} --ssh --direct --onstart {ONSTART} "
        f'--env {shlex.quote(environment)}"$TOKEN"{shlex.quote(" " + told)}'
    )


def _runpod(offer: Offer, launch: Launch) -> str:
    told = " ".join(f"--env {shlex.quote(f'{name}={value}')}" for name, value in _variables(offer, launch).items())
    bid = f" --bid {offer.usd_per_hour / offer.gpus:.4g}" if offer.interruptible else ""
    return (
        f"runpodctl create pod --name p2pserve --gpuType {shlex.quote(offer.name)} --gpuCount {offer.gpus} "
        f"--{offer.host}Cloud --imageName {shlex.quote(launch.image)} --containerDiskSize {_disk(offer, launch)} "
        f'--ports {PORT}/tcp{bid} --env P2PSERVE_BOOTSTRAP="$TOKEN" --env P2PSERVE_HOME=/workspace/p2pserve {told} '
        f'--args "join --port {PORT}"'
    )


def _disk(offer: Offer, launch: Launch) -> int:
    return ceil(launch.needs.disk_gb(offer))
