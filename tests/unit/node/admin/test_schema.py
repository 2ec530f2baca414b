"""The admin API against its own document: schemathesis makes up requests, and every answer has to be as it says."""

from __future__ import annotations

from typing import Any

import hypothesis
import schemathesis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from p2pserve.node.admin.api import MAX_FOLLOWERS
from p2pserve.node.dashboard.mounting import ADMIN_PATH, mount
from p2pserve.node.dev.showcase import Showcase
from p2pserve.node.web.access import Access

NOW = 1_800_000_000.0
TOKEN = "correct horse battery"
EXAMPLES = 12  # of each path


def served() -> Starlette:
    """The API over a modelled network. As many follow its events as may: a stream would not end by itself. A path with
    a line break is none of its own; the server around it says so in the same form."""

    async def refuse(request: Request, error: Exception) -> Response:
        said = {"message": f"path: nothing is served at {request.url.path}", "type": "not_found_error", "param": "path"}
        return JSONResponse({"error": {**said, "code": 404}}, 404)

    app = Starlette(exception_handlers={404: refuse})
    mount(app, Showcase(6, lambda: NOW, per_site=3), Access(TOKEN))
    for route in app.routes:
        if getattr(route, "path", "") == ADMIN_PATH:
            route.app.state.admin.followers = MAX_FOLLOWERS  # type: ignore[attr-defined]
    return app


schema = schemathesis.openapi.from_asgi(f"{ADMIN_PATH}/openapi.json", served())
schema.config.generation.update(with_security_parameters=False)


@schema.parametrize()
@hypothesis.settings(max_examples=EXAMPLES, derandomize=True, database=None)
def test_every_answer_is_as_the_document_says(case: Any) -> None:
    case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})
