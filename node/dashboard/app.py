"""The dashboard as an ASGI application, to be mounted at `/dashboard` of any other.

Pages are drawn on the box, as HTML and SVG; a script of a few lines asks each second for the sections that have
changed. So everything works by keyboard and for screen readers, a phone loads 30 kB, nothing comes from elsewhere, and
the browser is told to run and load nothing but that (Content-Security-Policy): what boxes and clients say cannot become
code, even if it were not escaped. Nobody who looks costs nothing; everybody who looks costs one snapshot a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ... import __version__
from ..admin.feed import Feed
from ..admin.naming import UnknownBox, find_box
from ..admin.source import SourceError
from ..web.access import SESSION_S, Access, Caller, Verdict
from ..web.fields import SESSION, VOUCHED
from .guard import Guard
from .sections import SECTIONS, TEMPLATES, event_groups
from .view import View

HEADERS: Final = MappingProxyType(
    {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
    }
)
MAX_QUERY: Final = 128  # characters of a value
MAX_DRAWN: Final = 64  # sections that are remembered for the next viewer
MAX_FORM: Final = 4096
QUERIES: Final = ("view", "sites", "site", "kind", "node", "request", "state")


@dataclass(frozen=True, slots=True)
class Screen:
    """A page: its title, the sections it consists of, and whether it is in the menu."""

    title: str
    sections: tuple[str, ...]
    in_menu: bool = True


PAGES: Final[Mapping[str, Screen]] = MappingProxyType(
    {
        "": Screen("Network", ("tiles", "topology", "boxes")),
        "plan": Screen("Plan", ("plan",)),
        "requests": Screen("Requests", ("requests",)),
        "events": Screen("Events", ("events",)),
        "chat": Screen("Chat", ()),
        "boxes": Screen("Box", ("box",), in_menu=False),
        "trace": Screen("Request", ("trace",), in_menu=False),
    }
)

PATHS: Final = ("", "plan", "requests", "events", "chat", "boxes/{about}", "requests/{about}")


@final
class Gallery:
    """Sections as they were drawn last, for all who look at the same: of one snapshot each is drawn once."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[object, ...], tuple[View, str, str]] = {}

    def draw(self, section: str, view: View) -> tuple[str, str]:
        """A section's HTML, and a short digest that changes with it."""
        key = (section, view.base, view.name, *sorted(view.query.items()))
        known = self._drawn.pop(key, None)
        if known is None or not _is_same(known[0], view):
            html = str(SECTIONS[section](view))
            known = (view, html, blake2s(html.encode(), digest_size=8).hexdigest())
        self._drawn[key] = known
        while len(self._drawn) > MAX_DRAWN:
            self._drawn.pop(next(iter(self._drawn)))
        return known[1], known[2]


def _is_same(one: View, other: View) -> bool:
    return one.snapshot is other.snapshot and one.links is other.links and one.trace == other.trace


@final
class Dashboard:
    """The pages of one application. `wall`: unix seconds, for sessions."""

    def __init__(self, feed: Feed, access: Access, wall: Callable[[], float]) -> None:
        self._feed = feed
        self._access = access
        self._wall = wall
        self._gallery = Gallery()

    async def show(self, request: Request) -> Response:
        """A page with all its sections."""
        name, about = _page_of(request)
        page = PAGES[name]
        try:
            view = await self._look(request, name, about)
        except SourceError as error:
            return self._answer(request, "silent.html", 503, page=name, error=str(error), refresh=True)
        except UnknownBox as error:
            return self._answer(request, "missing.html", 404, page="", error=str(error))
        drawn = {section: self._gallery.draw(section, view) for section in page.sections}
        title = view.label(view.name) if name == "boxes" else page.title
        return self._answer(
            request,
            f"{name or 'network'}.html" if name in ("events", "chat", "requests") else "page.html",
            page=name,
            title=title,
            view=view,
            drawn=drawn,
            groups=event_groups(),
        )

    async def news(self, request: Request) -> Response:
        """The sections of a page that are not as their viewer has them: `have` is a digest for each, in order."""
        name, about = _page_of(request)
        try:
            view = await self._look(request, name, about)
        except SourceError as error:
            return JSONResponse({"error": str(error)}, 503, {"Retry-After": "2"})
        except UnknownBox as error:
            return JSONResponse({"error": str(error)}, 404)
        have, changed = request.headers.get("x-have", "").split(","), {}
        for section in PAGES[name].sections:
            html, digest = self._gallery.draw(section, view)
            if digest not in have:
                changed[section] = {"html": html, "digest": digest}
        return JSONResponse({"time": view.snapshot.time, "sections": changed}, headers={"Cache-Control": "no-store"})

    async def ask_token(self, request: Request) -> Response:
        """The form for it, or on to the pages for who needs none."""
        if self._judge(request) is Verdict.ADMITTED:
            return RedirectResponse(_base(request) + "/", 303)
        return self._answer(request, "login.html", page="", error="")

    async def log_in(self, request: Request) -> Response:
        """Takes the form; a cookie for who has the token."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM:
                return self._answer(request, "login.html", 413, page="", error="admin-token: that is too long for one")
        caller = Caller.of_scope(request.scope, request.headers)
        token = dict(parse_qsl(body.decode("latin-1"))).get("token", "").strip()
        if not caller.is_own_page or not self._access.knows(token):
            return self._answer(request, "login.html", 401, page="", error="That is not this node's admin token.")
        response = RedirectResponse(_base(request) + "/", 303)
        response.set_cookie(
            self._access.cookie,
            self._access.open_session(self._wall()),
            max_age=SESSION_S,
            path=_base(request) or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def log_out(self, request: Request) -> Response:
        """Forgets the cookie."""
        response = RedirectResponse(_base(request) + "/login", 303)
        response.delete_cookie(self._access.cookie, path=_base(request) or "/")
        return response

    def admit(self, request: Request) -> Response | None:
        """None for who may look; else what they are answered."""
        verdict = self._judge(request)
        if verdict is Verdict.ADMITTED:
            return None
        if verdict is not Verdict.TOKEN_MISSING:
            return self._answer(request, "refused.html", 403, page="", error=verdict.value)
        if "x-have" in request.headers:
            return JSONResponse({"error": "log in again"}, 401)
        return RedirectResponse(_base(request) + "/login", 303)

    def _judge(self, request: Request) -> Verdict:
        caller = Caller.of_scope(request.scope, request.headers)
        return self._access.judge_session(caller, request.cookies.get(self._access.cookie, ""), self._wall())

    async def _look(self, request: Request, page: str, about: str) -> View:
        snapshot = await self._feed.snapshot()
        query = {name: request.query_params[name][:MAX_QUERY] for name in QUERIES if name in request.query_params}
        if query.get("node"):
            query["node"] = find_box(snapshot.nodes, query["node"]).id
        return View(
            snapshot=snapshot,
            links=await self._feed.links(),
            flows=self._feed.flows,
            tokens_s=self._feed.tokens_s,
            base=_base(request),
            query=query,
            name=find_box(snapshot.nodes, about, "box").id if page == "boxes" else about,
            trace=await self._feed.trace(about) if page == "trace" else None,
        )

    def _answer(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        base = _base(request)
        query = urlencode([(name, value) for name, value in request.query_params.items() if name in QUERIES])
        text = TEMPLATES.get_template(template).render(
            {"title": "p2pserve", "view": None, "refresh": False} | values,
            base=base,
            menu={name: page.title for name, page in PAGES.items() if page.in_menu},
            version=__version__,
            query=query,
            may_log_out=self._has_session(request) and status < 400 and template != "login.html",
        )
        return HTMLResponse(text, status, {"Cache-Control": "no-store"})

    def _has_session(self, request: Request) -> bool:
        """Whether who looks has logged in: here, or at the gateway that has carried this here."""
        if request.scope.get(VOUCHED) is True:
            return SESSION.decode() in request.headers
        return self._access.needs_token


def make_dashboard(feed: Feed, access: Access, wall: Callable[[], float]) -> Starlette:
    """The application. Its files are public; everything else is for who may look."""
    pages = Dashboard(feed, access, wall)
    shown = [
        Route("/login", pages.ask_token, methods=["GET"]),
        Route("/login", pages.log_in, methods=["POST"]),
        Route("/logout", pages.log_out, methods=["POST"]),
        Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
        *(Route(f"/news/{path}", pages.news) for path in PATHS),
        *(Route(f"/{path}", pages.show) for path in PATHS),
    ]
    return Starlette(
        routes=shown,
        middleware=[
            Middleware(Guard, admit=pages.admit, headers=HEADERS, open_to_all=("/login", "/logout", "/static/")),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
    )


def _page_of(request: Request) -> tuple[str, str]:
    """The page's name, and the box or request that it is about."""
    about = str(request.path_params.get("about", ""))
    first = request.url.path.removeprefix(_base(request)).removeprefix("/news").strip("/").partition("/")[0]
    return ("trace" if first == "requests" and about else first), about


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")
