"""Ends a run as soon as it is certain that it misses its SLO: most clusters of a search do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from ..records import Trace
from .cluster import RunStopped
from .metrics import PERCENTILES, LoneRequests, Slo

_CHECKED: Final = 64  # requests from one look at the clock to the next


class SearchTimeUp(Exception):
    """The time of a search is over."""


@final
class SloWatch:
    """Counts the requests that are beyond each of the nine limits. Implements `cluster.RunWatch`.

    A percentile is between two requests in order of their slowdowns. Once so many are beyond the
    limit that the lower of the two must be, nothing that follows can bring the percentile back:
    `missed` is its name, and the run stops. `is_time_up` ends the search.
    """

    def __init__(
        self, trace: Trace, lone: LoneRequests, slo: Slo, is_time_up: Callable[[], bool] = lambda: False
    ) -> None:
        last = len(trace) - 1
        self.missed: str | None = None
        self._left = {
            name: [last - int(percentile / 100 * last) for percentile in PERCENTILES] for name in slo
        }  # requests that may still be beyond the limit
        self._limits = slo
        self._ttft_s: list[float] = lone.ttft_s.tolist()
        self._tbt_s: list[float] = lone.tbt_s.tolist()
        self._e2e_s: list[float] = lone.e2e_s(trace.output).tolist()
        self._output: list[int] = trace.output.tolist()
        self._is_time_up = is_time_up
        self._ended = 0

    def note_first_token(self, request: int, ttft_s: float) -> None:
        """See `RunWatch`."""
        self._count("ttft", ttft_s / self._ttft_s[request])
        self._ended += 1
        if self._ended % _CHECKED == 0 and self._is_time_up():
            raise SearchTimeUp

    def note_last_token(self, request: int, ttft_s: float, e2e_s: float) -> None:
        """See `RunWatch`."""
        self._count("tbt", (e2e_s - ttft_s) / self._output[request] / self._tbt_s[request])
        self._count("e2e", e2e_s / self._e2e_s[request])

    def _count(self, name: str, slowdown: float) -> None:
        left = self._left[name]
        for place, limit in enumerate(self._limits[name]):
            if slowdown < limit:
                continue  # limits need not grow with the percentile
            left[place] -= 1
            if left[place] < 0:
                self.missed = f"{name}_p{PERCENTILES[place]}"
                raise RunStopped
