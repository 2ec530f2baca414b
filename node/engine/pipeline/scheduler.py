"""vLLM's scheduler for a replica of several stages, of which each works at another batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable


class Computed(Protocol):
    """The members of vLLM's `Request` that say how far it is."""

    num_computed_tokens: int  # those that are being computed included

    @property
    def num_tokens_with_spec(self) -> int:
        """Positions that it has, drafts included."""


def is_all_scheduled(running: Iterable[Computed]) -> bool:
    """Whether each of these requests is in a batch already, so that none could be put into another one."""
    return all(request.num_computed_tokens >= request.num_tokens_with_spec for request in running)


@final
class PipelineScheduler(Scheduler):
    """While a batch is under way, vLLM fills the pipeline with another one. If nobody is left for it, that one is
    empty; yet every stage would have to be asked, and to answer, between any two tokens of a lone request."""

    def has_requests(self) -> bool:
        """Whether there is anything to make a batch of. Asked before each one; without, vLLM waits for the oldest."""
        running, waiting = self.get_request_counts()
        if running and not waiting and not self.has_finished_requests() and is_all_scheduled(self.running):
            return False
        return bool(super().has_requests())
