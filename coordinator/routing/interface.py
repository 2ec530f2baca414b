"""What a routing policy is told, what it answers, and what holds of the answer.

    policy.choose(request, loads, now=now, rng=rng) -> Route

Gateways and simulations ask the same policies through a `Router`, so that what is simulated is what
runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Final, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from ..profile import ReplicaProfile
from .pools import NO_ANSWERS, PoolClaim, PoolLimits, PoolState

RequestId = str | int
"""Tells the requests of a gateway apart."""

LENGTH_PREDICTORS: Final = ("learned", "sampled")
"""What `RoutingSettings.length_predictor` may be."""


class NoRoute(LookupError):
    """No replica may take the request; the text is one line for the client and the log."""


class LoadError(ValueError):
    """A load report that cannot be; the text names the field."""


class PolicyError(ValueError):
    """Routing settings that cannot be followed; the text names the field and what it may be."""


class WorkBeside(NamedTuple):
    """Requests of other services whose engines take turns with a replica's, and the tokens of their prompts that are
    still to be prefilled."""

    requests: int = 0
    prefill_tokens: int = 0


NOTHING_BESIDE: Final = WorkBeside()


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's latest report: requests that it has not finished, tokens of their prompts that it
    still has to prefill, KV tokens that it still has room for, and how many of those requests it
    `decodes` (the others it only prefills). `sent_tokens`: those of the prompt tokens that this
    gateway has sent there since the replica reported. `told`: how it stands by its
    answer to a claim of this gateway since then, with what this has sent there after that.
    `beside`: what other services have on its GPUs, where its engine takes turns with theirs.

    `replica` is its id in the plan. On the running network that is the peer id of its head, the box
    that schedules for all of its stages.
    """

    replica: str
    outstanding: int
    prefill_tokens: int
    kv_free_tokens: int
    decodes: int = 0
    sent_tokens: int = 0
    told: PoolState | None = None
    beside: WorkBeside = NOTHING_BESIDE

    def __post_init__(self) -> None:
        if not self.replica:
            raise LoadError("load.replica is empty")
        figures = (
            self.outstanding, self.prefill_tokens, self.kv_free_tokens, self.decodes, self.sent_tokens, *self.beside
        )  # fmt: skip
        if min(figures) < 0:
            raise LoadError(f"load of {self.replica} has a negative figure")


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica ids for one request; `prefill` None: the decode replica prefills as well.

    `split` is how many tokens of the prompt the prefill replica computes, from its beginning: any
    number from 1 to all of them, or 0 without such a replica. `splits_there`: that replica says how
    many when it takes the request, `split` at most (`balancer`). `cached`: so many of those tokens it has in its
    cache, and sends without computing them (`prefixes.fetching`). `found`: so many of its tokens whoever computes
    the prompt's beginning is believed to have in its cache. `claims`: these replicas are to be
    asked first, and each may refuse (`pools`); then another route is chosen.
    """

    prefill: str | None
    decode: str
    split: int = 0
    splits_there: bool = False
    cached: int = 0
    found: int = 0
    claims: tuple[PoolClaim, ...] = ()

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
    simulation; gateways do not know it. `id`: the same for all attempts of a request; None: nobody
    will tell of its end. `max_output_tokens`: that its answer may still have, where its client says.
    `cached_tokens`: by replica in the order of the live state, tokens of its prompt whose KV that is
    believed to hold; None: of none. `answers`: whether replicas
    have accepted claims of its earlier routes.
    """

    prompt_tokens: int
    excluded: frozenset[str] = frozenset()
    output_tokens: int | None = None
    id: RequestId | None = None
    max_output_tokens: int | None = None
    cached_tokens: NDArray[np.float64] | None = None
    answers: Mapping[PoolClaim, bool] = NO_ANSWERS


@final
class ReplicaLoads:
    """The live state: what is known of each replica's load, as arrays in the order of `ids`.

    `outstanding` requests; `prefill_tokens` of their prompts still to compute; `kv_free_tokens`,
    infinite until it is reported; `decodes`, those of the requests that it generates answers of;
    `waiting` requests that have no place in a batch yet (0 where
    that is not told); `sent_tokens`, those of the prompt tokens that this gateway has sent there
    since the replica's report; `told`: how it stands by its answer to a claim of this gateway
    since its report, None where it has not been asked; `is_silent`: nothing has been reported.
    `gateways`: how many times the requests of this gateway all gateways have. `profiles`: how fast the replicas
    are, for policies that ask for that (`RoutingPolicy.needs_profiles`); None: not known.
    `usd_per_hour` of its boxes, 0 where that is not told. `round_trip_s`: what it takes this gateway to ask a replica.
    `beside_requests` and `beside_tokens`: see `WorkBeside`.
    Whoever runs the replicas writes here; policies only read.
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
        self.sent_tokens: NDArray[np.float64] = np.zeros(size)
        self.told: list[PoolState | None] = [None] * size
        self.gateways = 1.0
        self.beside_requests: NDArray[np.float64] = np.zeros(size)
        self.beside_tokens: NDArray[np.float64] = np.zeros(size)
        self.is_silent: NDArray[np.bool_] = np.ones(size, dtype=bool)
        self.usd_per_hour: NDArray[np.float64] = np.zeros(size)
        self.round_trip_s: NDArray[np.float64] = np.zeros(size)
        self.profiles: list[ReplicaProfile | None] = [None] * size

    def forget(self) -> None:
        """Take all replicas for silent."""
        self.is_silent[:] = True
        self.kv_free_tokens[:] = np.inf
        self.told[:] = [None] * len(self.ids)
        self.beside_requests[:] = self.beside_tokens[:] = 0.0

    def note(
        self,
        replica: str,
        outstanding: int,
        prefill_tokens: int,
        kv_free_tokens: float,
        *,
        waiting: int = 0,
        decodes: int = 0,
        sent_tokens: int = 0,
        told: PoolState | None = None,
    ) -> None:
        """Take in the latest figures of one replica. Raises KeyError for one that is not among
        `ids`."""
        at = self.index[replica]
        self.outstanding[at] = outstanding
        self.prefill_tokens[at] = prefill_tokens
        self.kv_free_tokens[at] = kv_free_tokens
        self.waiting[at] = waiting
        self.decodes[at] = decodes
        self.sent_tokens[at] = sent_tokens
        self.told[at] = told
        self.is_silent[at] = False

    def note_beside(self, replica: str, work: WorkBeside) -> None:
        """Take in what other services have on its GPUs. Raises KeyError likewise."""
        at = self.index[replica]
        self.beside_requests[at], self.beside_tokens[at] = work


class RoutingPolicy(ABC):
    """Chooses the replicas of each request under one plan.

    A policy is made for a plan and lives as long as that is followed; what it remembers of earlier
    requests (shares, turns, pools) is its own. It must not keep `loads`: they are the same object
    at each call, and change in between.

    It is called once for each attempt of a request, on the gateway's event loop: it must not wait,
    and should take less than a millisecond for 100 replicas. It reads no clock and draws no random
    numbers but from `rng`, so that the same calls have the same answers.
    """

    needs_profiles: ClassVar[bool] = False
    """Whether `loads.profiles` is to be kept up to date for it."""

    mixes_phases: ClassVar[bool] = False
    """Whether any replica may prefill and decode, whatever the plan has it for, so that gateways without deadlines are
    not to hold requests back for those of a phase alone (`coordinator/requests/engine_room.py`)."""

    lends_replicas: ClassVar[bool] = False
    """Whether replicas do work that the plan's phases do not give them, so that the coordinator is
    to watch who does for long (`coordinator/repair/repurposing.py`)."""

    @abstractmethod
    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """The replicas for a request that is routed at `now` (seconds, of a clock that does not go
        back).

        Whatever it answers is followed: the route must name replicas of the plan, none of them
        excluded nor with an excluded box, the first of which prefills and the second decodes,
        unless a request could not be served otherwise. Raises NoRoute where no replica is left.
        """

    def on_end(self, request: RequestId, output_tokens: int | None) -> None:  # noqa: B027 (likewise)
        """A request of this gateway has ended, for whatever reason; `output_tokens` of its answer,
        None where that is not complete. Told once of each, also of one that was never routed, or by
        an earlier policy."""

    def take_over(self, earlier: RoutingPolicy) -> None:  # noqa: B027 (likewise)
        """This policy takes the place of `earlier`, whose plan is followed no more: keep what holds
        still, such as the requests that have not ended."""

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
    `prefix_weight`: a token whose KV a replica holds counts for so many in its queue. Higher: prompts go
    more to where their prefix is, and queues grow longer there before others take some; 0: prefixes do
    not count. `prefix_fetch`: the KV of a prefix comes from another replica that holds it where that is
    expected to take at most this share of the time of computing it (`prefixes.fetching`). Higher: more is
    fetched, for less; 0: nothing.

    Of the policy `hetero`: `kv_pressure` is theta of Xiong et al., equation 7: a replica counts as
    e^(theta * u) times as slow while the share u of its KV cache is spoken for. Higher values share
    requests by memory rather than by speed. `length_predictor` guesses how long answers will be:
    `learned`, the mean of answers to prompts of about this length; `sampled`, as in the paper, a
    number drawn from the normal distribution of all answers lately.

    Of the policy `splitwise`, and of a replica that is asked for a place in its pool, whose settings
    count: `max_pending_tokens`, the longest queue of a replica before one of
    another pool is asked (higher: fewer are borrowed, and prompts wait longer); `answer_tokens`, the
    KV that a request must find free beside its prompt where the length of its answer is not known
    (higher: fewer requests to a replica before others are borrowed).
    """

    policy: str = "predicted"
    remembered_requests: int = 128
    free_share: float = 1.5
    prefix_weight: float = 4.0
    prefix_fetch: float = 1.0
    kv_pressure: float = 2.0
    length_predictor: str = "learned"
    max_pending_tokens: int = 8192
    answer_tokens: int = 256

    def __post_init__(self) -> None:
        if self.remembered_requests < 1:
            raise PolicyError(f"routing.remembered_requests is {self.remembered_requests}; it must be at least 1")
        if not self.free_share >= 1.0:
            raise PolicyError(f"routing.free_share is {self.free_share}; it must be at least 1")
        if not (isfinite(self.prefix_weight) and self.prefix_weight >= 0.0):
            raise PolicyError(f"routing.prefix_weight is {self.prefix_weight}; it must be 0 or more")
        if not (isfinite(self.prefix_fetch) and self.prefix_fetch >= 0.0):
            raise PolicyError(f"routing.prefix_fetch is {self.prefix_fetch}; it must be 0 or more")
        if not (isfinite(self.kv_pressure) and self.kv_pressure >= 0.0):
            raise PolicyError(f"routing.kv_pressure is {self.kv_pressure}; it must be 0 or more")
        if self.length_predictor not in LENGTH_PREDICTORS:
            known = ", ".join(LENGTH_PREDICTORS)
            raise PolicyError(f"routing.length_predictor is {self.length_predictor!r}, none of {known}")
        if min(self.max_pending_tokens, self.answer_tokens) < 1:
            raise PolicyError("routing.max_pending_tokens and routing.answer_tokens must be at least 1")

    @property
    def pool_limits(self) -> PoolLimits:
        """What a replica takes of one pool's work."""
        return PoolLimits(self.max_pending_tokens, self.answer_tokens)


PolicyFactory = Callable[[Plan, RoutingSettings], RoutingPolicy]
"""Makes a policy for a plan; usually the policy's class."""
