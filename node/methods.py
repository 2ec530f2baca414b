"""The catalogue: every question that nodes and clients ask each other, and every notice that they give.

One line per method: its name on the wire, what is sent, what comes back, and who may call it if not members only.
`messages` says how they follow each other in a request's life. A new one is a message there, a line here, and a
handler (`docs/extending.md`).
"""

from __future__ import annotations

from typing import Final

from ..bootstrap.methods import EVERYONE, Method, Notice
from ..bootstrap.trust.tokens import Role
from . import messages as m
from .http import messages as http
from .links import messages as reach
from .observing import queries
from .owner import messages as owner
from .planning import messages as plans
from .prefixes import messages as prefixes
from .requests import slot_messages as slots

# Clients ask a gateway.
STATUS: Final = Method("status", m.StatusQuery, m.Status, EVERYONE)
GENERATE: Final = Method("generate", m.Generate, m.Generating, EVERYONE)
GENERATE_CONTINUE: Final = Method("generate.continue", m.ContinueGenerate, m.Generating, EVERYONE)
GENERATE_STOP: Final = Notice("generate.stop", m.StopRequest, EVERYONE)
ANSWER: Final = Notice("answer", m.AnswerUpdate)

# Whoever wants to know what happened. What clients are told of it: see `observing.desk`.
EVENTS: Final = Method("events", queries.EventQuery, queries.EventPage, EVERYONE)
TRACE: Final = Method("request.trace", queries.TraceQuery, queries.TraceAnswer, EVERYONE)
METRICS: Final = Method("metrics", queries.MetricsQuery, queries.MetricsPage)

# Whoever carries HTTP asks a box with an API server.
HTTP_OPEN: Final = Method("http.open", http.HttpOpen, m.Opened, EVERYONE)
HTTP_MORE: Final = Notice("http.more", http.HttpMore, EVERYONE)
HTTP_ANSWER: Final = Notice("http.answer", http.HttpAnswer)
HTTP_STOP: Final = Notice("http.stop", m.StopRequest, EVERYONE)

# A gateway and the heads of the replicas that serve a request.
DECODE_OPEN: Final = Method("decode.open", m.DecodeOpen, m.DecodeOpened)
DECODE_FIRST: Final = Notice("decode.first", m.FirstToken)
PREFILL_OPEN: Final = Method("prefill.open", m.PrefillOpen, m.Opened)
PREFILL_SLOT: Final = Method("prefill.slot", slots.SlotOpen, slots.SlotOpened)
DECODE_STATE: Final = Method("decode.state", slots.DecodeStateQuery, slots.DecodeStateAnswer)
POOL_CLAIM: Final = Method("pool.claim", slots.PoolAsk, slots.PoolAnswer)
PREFIXES: Final = Method("prefixes", prefixes.PrefixQuery, prefixes.PrefixAnswer)
PREFILL_ENDED: Final = Notice("prefill.ended", m.PrefillEnded)
TOKENS: Final = Notice("tokens", m.Tokens)
REPLICA_HUNG: Final = Notice("replica.hung", m.ReplicaHung)
REQUEST_STOP: Final = Notice("request.stop", m.StopRequest)
TRANSFER_STOP: Final = Notice("transfer.stop", m.StopTransfer)

# The head of a replica and its other stages.
STAGE_OPEN: Final = Method("stage.open", m.StageOpen, m.Opened)
STAGE_LOADED: Final = Notice("stage.loaded", m.StageLoaded)
STAGE_INLETS: Final = Method("stage.inlets", m.StageInlets, m.StageInletsOpened)
STAGE_OUTLETS: Final = Method("stage.outlets", m.StageOutlets, m.StageOutletsOpened)
STAGE_TRANSFER: Final = Notice("stage.transfer", m.StageTransfer)
STAGE_ABORT: Final = Notice("stage.abort", m.StageAbort)
STAGE_HUNG: Final = Notice("stage.hung", m.ReplicaHung)

# An admin of the network tells any box, the one with its key, and its coordinator.
DRAIN: Final = Method("drain", owner.Drain, owner.Drained, frozenset({Role.ADMIN}))
CATALOGUE_CHANGE: Final = Method(
    "catalogue.change", owner.CatalogueChange, owner.CatalogueChanged, frozenset({Role.ADMIN})
)
PLAN_REGROUP: Final = Method("plan.regroup", plans.RegroupOrder, plans.RegroupBegun, frozenset({Role.ADMIN}))

# Any two nodes, for plans.
PLAN_PIECE: Final = Method("plan.piece", plans.PlanPieceQuery, plans.PlanPiece)

# Any two nodes, for KV and so that each is reached.
LINK_OPEN: Final = Method("link.open", m.LinkOpen, m.LinkOpened)
RELAY_OPEN: Final = Method("relay.open", m.RelayOpen, m.RelayOpened, EVERYONE)
DIAL_BACK: Final = Method("dial.back", reach.DialBack, reach.DialledBack, EVERYONE)
CALL_BACK: Final = Method("call.back", reach.CallBack, reach.CalledBack)
BANDWIDTH: Final = Method("bandwidth", reach.CarryBytes, reach.CarriedBytes, EVERYONE)
TOKEN_PLACES: Final = Method("token.places", reach.PlacesQuery, reach.PlacesLeft, EVERYONE)
PROBE_OPEN: Final = Method("probe.open", m.ProbeOpen, m.ProbeOpened)
