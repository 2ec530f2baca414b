"""The admin API: nodes, links, plan, requests and events as JSON, for who has the admin token.

An ASGI application of its own, to be mounted at `/p2p/v1` of any other. Errors are in OpenAI's envelope, as those of
the API beside it: `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar, final

import msgspec
from fastapi import Depends, FastAPI, Header, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from ... import __version__
from ..observing.values import NodeEvent, NodeSummary
from ..web.access import Access, Caller, Verdict
from . import schema
from .feed import SNAPSHOT_S, Feed
from .listing import (
    MAX_PAGE,
    PAGE,
    CursorError,
    EventFilter,
    LinkFilter,
    Order,
    cut_page,
    event_key,
    find_news,
    link_key,
    select_events,
    select_links,
    select_nodes,
    select_requests,
    skip_seen,
)
from .naming import UnknownBox, find_box, shown
from .source import SourceError

MAX_FOLLOWERS: Final = 32
KEEP_ALIVE_S: Final = 15.0
DESCRIPTION: Final = """What a p2pserve network consists of and what it does, as the answering node sees it.

Every request shows the admin token: `Authorization: Bearer <token>`. Boxes are named by their short names or their
peer ids. Times are unix seconds, durations seconds, sizes bytes, rates Gb/s of 10^9 bits, money US dollars."""

T = TypeVar("T")

_encoder = msgspec.json.Encoder()

BoxName = Annotated[str, Path(min_length=1, max_length=128, description="short name or peer id")]
AnyBox = Annotated[str | None, Field(min_length=1, max_length=128, description="short name or peer id")]
Label = Annotated[str | None, Field(min_length=1, max_length=512)]
Gbps = Annotated[float | None, Field(ge=0, le=1e6, allow_inf_nan=False)]
ServiceName = Annotated[str | None, Query(max_length=512, description="as `nodes` tell of it")]
RequestName = Annotated[str, Path(min_length=1, max_length=128)]


class ListQuery(BaseModel, extra="forbid"):
    """Which part of a list. What is mistyped is refused: it must not answer with everything."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="items of a page, at most")] = PAGE
    after: Annotated[str | None, Field(max_length=512, description="`last_id` of the page before")] = None


class NodesQuery(ListQuery):
    """Of these boxes."""

    site: Label = None
    state: Label = None
    phase: Label = None
    service: Label = None


class LinksQuery(ListQuery):
    """Of these links; `site` is that of either end."""

    source: AnyBox = None
    target: AnyBox = None
    site: Label = None
    known: Label = None
    min_gbps: Gbps = None
    max_gbps: Gbps = None


class RequestsQuery(ListQuery):
    """Of these requests; `node` is gateway or either replica's box."""

    node: AnyBox = None
    state: Label = None
    service: Label = None
    order: Order = "desc"


class EventsQuery(ListQuery):
    """Of these events; `node` is the box that tells or the one told of."""

    kind: Annotated[str | None, Field(min_length=1, max_length=128, description="a kind, or a group of them")] = None
    node: AnyBox = None
    request: Label = None
    order: Order = "desc"
    stream: Annotated[bool, Field(description="follow them as server-sent events")] = False


@final
class Admin:
    """What the paths of one application share."""

    def __init__(self, feed: Feed, access: Access) -> None:
        self.feed = feed
        self.access = access
        self.followers = 0


class AdminRefusal(HTTPException):
    """An answer other than 200, with the parameter that is to blame, if one is."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(status, message, {"WWW-Authenticate": "Bearer"} if status == 401 else None)
        self.param = param


async def admin_of(request: Request) -> Admin:
    """The application's own, for who may look and asks for what there is. Raises AdminRefusal."""
    admin = request.app.state.admin
    assert isinstance(admin, Admin)
    caller = Caller.of_scope(request.scope, request.headers)
    verdict = admin.access.judge_bearer(caller, request.headers.get("authorization", ""))
    if verdict is not Verdict.ADMITTED:
        status = 401 if verdict in (Verdict.TOKEN_MISSING, Verdict.TOKEN_WRONG) else 403
        raise AdminRefusal(status, verdict.value)
    return admin


Admitted = Annotated[Admin, Depends(admin_of)]
BEARER = HTTPBearer(auto_error=False, description="the token of `--admin-token`")


def make_admin_api(feed: Feed, access: Access) -> FastAPI:
    """The application. It serves its own OpenAPI document, to anybody: that says nothing of this network."""
    app = FastAPI(
        title="p2pserve admin API",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # both would load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.admin = Admin(feed, access)
    secured: list[Any] = [Depends(BEARER)]
    for path, endpoint, body in (
        ("/nodes", list_nodes, schema.answer("nodes", more=schema.NOT_FOUND)),
        ("/nodes/{name}", show_node, schema.answer("node", more=schema.NOT_FOUND)),
        ("/links", list_links, schema.answer("links", more=schema.NOT_FOUND)),
        ("/links/{source}/{target}", show_link, schema.answer("link", more=schema.NOT_FOUND)),
        ("/plan", show_plan, schema.answer("plan", more=schema.NOT_FOUND)),
        ("/requests", list_requests, schema.answer("requests", more=schema.NOT_FOUND)),
        ("/requests/{request_id}", show_request, schema.answer("request", more=schema.NOT_FOUND)),
        ("/events", list_events, schema.answer("events", stream=True, more=schema.NOT_FOUND, many=schema.TOO_MANY)),
    ):
        app.add_api_route(path, endpoint, responses=body, dependencies=secured, response_class=Response)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(StarletteHTTPException, _answer_refusal)
    app.add_exception_handler(UnknownBox, _answer_unknown)
    app.add_exception_handler(CursorError, _answer_cursor)
    app.add_exception_handler(SourceError, _answer_silent)
    app.openapi = lambda: schema.openapi_of(app)  # type: ignore[method-assign]
    return app


async def list_nodes(admin: Admitted, query: Annotated[NodesQuery, Query()]) -> Response:
    """The boxes of the network, without its clients."""
    nodes = (await admin.feed.snapshot()).nodes
    found = select_nodes(nodes, site=query.site, state=query.state, phase=query.phase, service=query.service)
    return _json(cut_page(found, lambda node: node.id, limit=query.limit, after=query.after))


async def show_node(admin: Admitted, name: BoxName) -> Response:
    """One box."""
    return _json(find_box((await admin.feed.snapshot()).nodes, name))


async def list_links(admin: Admitted, query: Annotated[LinksQuery, Query()]) -> Response:
    """Directed links: what they carry, how surely that is known, and why it is believed."""
    nodes = (await admin.feed.snapshot()).nodes
    wanted = LinkFilter(**query.model_dump(exclude={"limit", "after"}))
    found = select_links(await admin.feed.links(), nodes, wanted)
    return _json(cut_page(found, link_key, limit=query.limit, after=query.after))


async def show_link(admin: Admitted, source: BoxName, target: BoxName) -> Response:
    """One directed link."""
    nodes = (await admin.feed.snapshot()).nodes
    ends = find_box(nodes, source, "source").id, find_box(nodes, target, "target").id
    for link in await admin.feed.links():
        if (link.source, link.target) == ends:
            return _json(link)
    raise AdminRefusal(404, f"target: nothing is known yet of a link from {source} to {target}", param="target")


async def show_plan(admin: Admitted, service: ServiceName = None) -> Response:
    """The plan that the node follows for a service, with its reasons; where none is named, that of the one which most
    boxes offer."""
    plans = (await admin.feed.snapshot()).plans
    if not plans:
        raise AdminRefusal(404, "there is no plan yet: it is made once a box with a model is ready")
    found = next((plan for plan in plans if service in (None, plan.service)), None)
    if found is None:
        known = ", ".join(plan.service for plan in plans)
        raise AdminRefusal(
            404, f"service: there is no plan for {service}; there are plans for {known}", param="service"
        )
    return _json(found)


async def list_requests(admin: Admitted, query: Annotated[RequestsQuery, Query()]) -> Response:
    """The latest requests; nobody is shown what was asked or answered."""
    snapshot = await admin.feed.snapshot()
    peer = _peer(snapshot.nodes, query.node)
    found = select_requests(snapshot.requests, node=peer, state=query.state, service=query.service)
    return _json(
        cut_page(_ordered(found, query.order), lambda request: request.id, limit=query.limit, after=query.after)
    )


async def show_request(admin: Admitted, request_id: RequestName) -> Response:
    """One request across boxes: queue, prefill, KV, decode, replays."""
    trace = await admin.feed.trace(request_id)
    if trace is None:
        text = f"request_id: no box remembers a request {shown(request_id)}; /requests has those that are"
        raise AdminRefusal(404, text, param="request_id")
    return _json(trace)


async def list_events(
    admin: Admitted,
    query: Annotated[EventsQuery, Query()],
    last_event_id: Annotated[str | None, Header(max_length=512)] = None,
) -> Response:
    """What happened, the latest first. With `stream`, what happens from now on, or after `Last-Event-ID`."""
    snapshot = await admin.feed.snapshot()
    wanted = EventFilter(kind=query.kind, node=_peer(snapshot.nodes, query.node), request=query.request)
    if query.stream:
        if admin.followers >= MAX_FOLLOWERS:
            raise AdminRefusal(429, f"{MAX_FOLLOWERS} follow the events already; try again when one of them has ended")
        chunks = _follow(admin, wanted, last_event_id or query.after)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
    found = _ordered(select_events(snapshot.events, wanted), query.order)
    return _json(cut_page(found, event_key, limit=query.limit, after=query.after))


async def _follow(admin: Admin, wanted: EventFilter, last: str | None) -> AsyncIterator[bytes]:
    """Events as they come, and a comment now and then, so that nothing between takes the connection for dead."""
    async with _following(admin):
        known = (await admin.feed.snapshot()).events
        news = list(skip_seen(known, last)) if last is not None else []
        silent_s = 0.0
        yield b": following\n\n"
        while True:
            chosen = select_events(news, wanted)
            if chosen:
                yield b"".join(map(_as_sent, chosen))
            elif silent_s >= KEEP_ALIVE_S:
                yield b": nothing new\n\n"
            silent_s = 0.0 if chosen or silent_s >= KEEP_ALIVE_S else silent_s + SNAPSHOT_S
            await asyncio.sleep(SNAPSHOT_S)
            try:
                events = (await admin.feed.snapshot()).events
            except SourceError as error:
                yield b": " + _one_line(str(error)) + b"\n\n"
                news = []
                continue
            news, known = find_news(known, events), events


def _as_sent(event: NodeEvent) -> bytes:
    key, kind = event_key(event).encode(), _one_line(event.kind)
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (key, kind, _encoder.encode(event))


@asynccontextmanager
async def _following(admin: Admin) -> AsyncIterator[None]:
    admin.followers += 1
    try:
        yield
    finally:
        admin.followers -= 1


def _one_line(text: str) -> bytes:
    """A box's words, which may not begin a field of their own."""
    return " ".join(text.split()).encode()


def _peer(nodes: tuple[NodeSummary, ...], name: str | None) -> str | None:
    return find_box(nodes, name).id if name is not None else None


def _ordered(items: list[T], order: Order) -> list[T]:
    return items[::-1] if order == "desc" else items


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, {"Cache-Control": "no-store"} | (headers or {}), "application/json")


def _error(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> Response:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return _json(body, status, headers)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = str(first["loc"][-1])
    what = "there is no such parameter" if first["type"] == "extra_forbidden" else first["msg"]
    return _error(422, f"{field}: {what}", field)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    known = error.status_code == 404 and not isinstance(error, AdminRefusal)
    message = f"there is no {request.url.path}; /openapi.json has all paths" if known else str(error.detail)
    headers = dict(error.headers) if error.headers else None
    return _error(error.status_code, message, getattr(error, "param", None), headers)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    return _error(404, str(error), str(error).partition(":")[0])


async def _answer_cursor(request: Request, error: Exception) -> Response:
    return _error(404, str(error), "after")


async def _answer_silent(request: Request, error: Exception) -> Response:
    return _error(503, str(error), headers={"Retry-After": "1"})
