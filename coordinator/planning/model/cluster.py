"""What can be planned with: boxes of equal GPUs, the links between them, and what both cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...costs.gpus import GpuSpec
from ...profile import MeasuredCosts

Matrix = NDArray[np.float64]


class ClusterError(ValueError):
    """A cluster that cannot be; one line that names the box, link or field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One rented machine with `gpus` equal cards.

    `usd_per_hour` is the price of the whole box. `gpu_link_gbps` (Gb/s) is what two of its cards
    reach between each other: NVLink or PCIe. `atomic`: all its cards work together or not at all (a
    node of the running network, whose engine has started already). `measured`: constants of that
    engine's own steps, where they say otherwise than `gpu`.
    """

    id: str
    gpu: GpuSpec
    gpus: int
    site: str = ""
    usd_per_hour: float = 0.0
    gpu_link_gbps: float = 160.0
    atomic: bool = False
    measured: MeasuredCosts | None = None

    def __post_init__(self) -> None:
        if not self.id:
            raise ClusterError("box.id is empty")
        if self.gpus < 1:
            raise ClusterError(f"box {self.id}: gpus is {self.gpus}; it must be at least 1")
        if not (np.isfinite(self.usd_per_hour) and self.usd_per_hour >= 0.0):
            raise ClusterError(f"box {self.id}: usd_per_hour is {self.usd_per_hour}; it must not be negative")
        if not (np.isfinite(self.gpu_link_gbps) and self.gpu_link_gbps > 0.0):
            raise ClusterError(f"box {self.id}: gpu_link_gbps is {self.gpu_link_gbps}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Boxes and the directed links between them; matrices are [from, to], in the order of `boxes`.

    `gbps`: Gb/s that n TCP streams reach; 0 where there is no link. `rtt_s`: round trip.
    `usd_per_gb`: of traffic. The diagonals are not looked at: inside a box `gpu_link_gbps` counts.
    """

    boxes: tuple[Box, ...]
    gbps: Matrix
    rtt_s: Matrix
    usd_per_gb: Matrix

    def __post_init__(self) -> None:
        if not self.boxes:
            raise ClusterError("the cluster has no boxes")
        seen: set[str] = set()
        for box in self.boxes:
            if box.id in seen:
                raise ClusterError(f"box {box.id} is there twice")
            seen.add(box.id)
        wanted = (len(self.boxes), len(self.boxes))
        for field in ("gbps", "rtt_s", "usd_per_gb"):
            matrix = getattr(self, field)
            if matrix.shape != wanted:
                raise ClusterError(f"cluster.{field} has shape {matrix.shape}, {wanted} is needed")
            off = matrix[~np.eye(len(self.boxes), dtype=bool)]
            bad = ~np.isfinite(off) | (off < 0.0)
            if bad.any():
                raise ClusterError(f"cluster.{field} has a figure of {off[bad][0]}: {self._where(matrix)}")

    def _where(self, matrix: Matrix) -> str:
        bad = ~np.isfinite(matrix) | (matrix < 0.0)
        np.fill_diagonal(bad, False)
        source, target = np.argwhere(bad)[0]
        return f"{self.boxes[source].id} -> {self.boxes[target].id}"

    @property
    def gpus(self) -> int:
        """Cards in all boxes."""
        return sum(box.gpus for box in self.boxes)

    @property
    def usd_per_hour(self) -> float:
        """Of all boxes."""
        return sum(box.usd_per_hour for box in self.boxes)

    def index(self, box_id: str) -> int:
        """Where a box is in the matrices. Raises ClusterError."""
        for number, box in enumerate(self.boxes):
            if box.id == box_id:
                return number
        raise ClusterError(f"box {box_id} is not in the cluster")

    def without(self, box_ids: frozenset[str]) -> Cluster:
        """The cluster when these boxes are gone."""
        keep = [number for number, box in enumerate(self.boxes) if box.id not in box_ids]
        cut: Any = np.ix_(keep, keep)
        return Cluster(
            boxes=tuple(self.boxes[number] for number in keep),
            gbps=self.gbps[cut],
            rtt_s=self.rtt_s[cut],
            usd_per_gb=self.usd_per_gb[cut],
        )
