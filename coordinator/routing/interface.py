"""What a routing policy is told, what it answers, and what holds of the answer.

    policy.choose(request, loads, now=now, rng=rng) -> Route

Gateways and simulations ask the same policies through a `Router`, so that what is simulated is what
runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plan import Plan


class NoRoute(LookupError):
    """No replica may take the request; the text is one line for the client and the log."""


class LoadError(ValueError):
    """A load report that cannot be; the text names the field."""


class PolicyError(ValueError):
    """Routing settings that cannot be followed; the text names the field and what it may be."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's latest report: requests that it has not finished, tokens of their prompts that it
    still has to prefill, KV tokens that it still has room for, and how many of those requests it
    `decodes` (the others it only prefills).

    `replica` is its id in the plan. On the running network that is the peer id of its head, the box
    that schedules for all of its stages.
    """

    replica: str
    outstanding: int
    prefill_tokens: int
    kv_free_tokens: int
    decodes: int = 0

    def __post_init__(self) -> None:
        if not self.replica:
            raise LoadError("load.replica is empty")
        if min(self.outstanding, self.prefill_tokens, self.kv_free_tokens, self.decodes) < 0:
            raise LoadError(f"load of {self.replica} has a negative figure")


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica ids for one request; `prefill` None: the decode replica prefills as well.

    `split` is how many tokens of the prompt the prefill replica computes, from its beginning: any
    number from 1 to all of them, or 0 without such a replica.
    """

    prefill: str | None
    decode: str
    split: int = 0

    @classmethod
    def between(cls, prefill: str, decode: str, split: int) -> Route:
        """Over these two replicas, which may be one and the same: then nothing is split."""
        if prefill == decode:
            return cls(prefill=None, decode=decode)
        return cls(prefill=prefill, decode=decode, split=split)


class RequestFacts(NamedTuple):
    """What a policy may know of a request.

    `prompt_tokens`: tokens to prefill; of a request that goes on after a failure, its prompt and
    its answer so far. `excluded`: ids of boxes and replicas that it must not be sent to.
    `output_tokens`: the length of its answer, where that is known beforehand, as it is in a
    simulation; gateways do not know it.
    """

    prompt_tokens: int
    excluded: frozenset[str] = frozenset()
    output_tokens: int | None = None


@final
class ReplicaLoads:
    """The live state: what is known of each replica's load, as arrays in the order of `ids`.

    `outstanding` requests; `prefill_tokens` of their prompts still to compute; `kv_free_tokens`,
    infinite until it is reported; `decodes`, those of the requests that it generates answers of;
    `waiting` requests that have no place in a batch yet (0 where
    that is not told); `is_silent`: nothing has been reported. Whoever runs the replicas writes
    here; policies only read.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = tuple(ids)
        self.index = {name: number for number, name in enumerate(self.ids)}
        size = len(self.ids)
        self.outstanding: NDArray[np.float64] = np.zeros(size)
        self.prefill_tokens: NDArray[np.float64] = np.zeros(size)
        self.kv_free_tokens: NDArray[np.float64] = np.full(size, np.inf)
        self.decodes: NDArray[np.float64] = np.zeros(size)
        self.waiting: NDArray[np.float64] = np.zeros(size)
        self.is_silent: NDArray[np.bool_] = np.ones(size, dtype=bool)

    def forget(self) -> None:
        """Take all replicas for silent."""
        self.is_silent[:] = True
        self.kv_free_tokens[:] = np.inf

    def note(
        self,
        replica: str,
        outstanding: int,
        prefill_tokens: int,
        kv_free_tokens: float,
        *,
        waiting: int = 0,
        decodes: int = 0,
    ) -> None:
        """Take in the latest figures of one replica. Raises KeyError for one that is not among
        `ids`."""
        at = self.index[replica]
        self.outstanding[at] = outstanding
        self.prefill_tokens[at] = prefill_tokens
        self.kv_free_tokens[at] = kv_free_tokens
        self.waiting[at] = waiting
        self.decodes[at] = decodes
        self.is_silent[at] = False


class RoutingPolicy(ABC):
    """Chooses the replicas of each request under one plan.

    A policy is made for a plan and lives as long as that is followed; what it remembers of earlier
    requests (shares, turns, pools) is its own. It must not keep `loads`: they are the same object
    at each call, and change in between.

    It is called once for each attempt of a request, on the gateway's event loop: it must not wait,
    and should take less than a millisecond for 100 replicas. It reads no clock and draws no random
    numbers but from `rng`, so that the same calls have the same answers.
    """

    @abstractmethod
    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """The replicas for a request that is routed at `now` (seconds, of a clock that does not go
        back).

        Whatever it answers is followed: the route must name replicas of the plan, none of them
        excluded nor with an excluded box, the first of which prefills and the second decodes,
        unless a request could not be served otherwise. Raises NoRoute where no replica is left.
        """

    def on_drained(self, replica: int) -> None:  # noqa: B027 (a hook that most policies leave as it is)
        """A replica (index in the live state) has run out of work. Told by simulations only:
        gateways do not know of each other's requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """How a gateway routes.

    `policy`: its name among those that the router knows. `remembered_requests`: about how many of
    the latest requests the policy `plan` balances links over. More follow the plan's shares more
    closely in the long run, and take longer to answer to a change. `free_share`: times its share of
    those requests that a pair of replicas over a link may have before it counts as busier than its
    queues say. Higher values let idle replicas take more over thin links, which then fall behind.

    Of the policy `splitwise`: `max_pending_tokens`, the longest queue of a replica before one of
    another pool is asked (higher: fewer are borrowed, and prompts wait longer); `answer_tokens`, the
    KV that a request must find free beside its prompt where the length of its answer is not known
    (higher: fewer requests to a replica before others are borrowed).
    """

    policy: str = "plan"
    remembered_requests: int = 128
    free_share: float = 1.5
    max_pending_tokens: int = 8192
    answer_tokens: int = 256

    def __post_init__(self) -> None:
        if self.remembered_requests < 1:
            raise PolicyError(f"routing.remembered_requests is {self.remembered_requests}; it must be at least 1")
        if not self.free_share >= 1.0:
            raise PolicyError(f"routing.free_share is {self.free_share}; it must be at least 1")
        if min(self.max_pending_tokens, self.answer_tokens) < 1:
            raise PolicyError("routing.max_pending_tokens and routing.answer_tokens must be at least 1")


PolicyFactory = Callable[[Plan, RoutingSettings], RoutingPolicy]
"""Makes a policy for a plan; usually the policy's class."""
