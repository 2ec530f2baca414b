"""The OpenAPI document of the admin API: FastAPI's, with the schemas of our own values in it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import FastAPI

from ...coordinator import Plan
from ..observing.values import LinkSummary, NodeEvent, NodeSummary, RequestSummary, RequestTrace
from .listing import ListPage

_TEMPLATE: Final = "#/components/schemas/{name}"
BODIES: Final = {
    "nodes": ListPage[NodeSummary],
    "node": NodeSummary,
    "links": ListPage[LinkSummary],
    "link": LinkSummary,
    "plan": Plan,
    "requests": ListPage[RequestSummary],
    "request": RequestTrace,
    "events": ListPage[NodeEvent],
}
"""What answers consist of, by the name that `answer` takes."""

_REFERENCES, _COMPONENTS = msgspec.json.schema_components(BODIES.values(), ref_template=_TEMPLATE)
_SCHEMAS: Final = dict(zip(BODIES, _REFERENCES, strict=True))

ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    401: {"description": "No token, or not the admin token"},
    403: {"description": "This node has no admin token, and the request does not come from its own box"},
    422: {"description": "A parameter that cannot be; `param` names it"},
    503: {"description": "The node does not answer; try again in a second"},
}
NOT_FOUND: Final[dict[int | str, dict[str, Any]]] = {404: {"description": "There is none of that name"}}
TOO_MANY: Final[dict[int | str, dict[str, Any]]] = {429: {"description": "Too many follow the events already"}}

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "integer"},
            },
        }
    },
}


def answer(name: str, *, stream: bool = False, **more: dict[int | str, dict[str, Any]]) -> dict[int | str, Any]:
    """FastAPI's `responses` of a path that answers with this body, and with what may go wrong."""
    content: dict[str, Any] = {"application/json": {"schema": _SCHEMAS[name]}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    found: dict[int | str, Any] = {200: {"description": "As the node sees it", "content": content}}
    for errors in (ERRORS, *more.values()):
        for status, response in errors.items():
            reference = {"application/json": {"schema": {"$ref": _TEMPLATE.format(name="Error")}}}
            found[status] = {**response, "content": reference}
    return dict(sorted(found.items(), key=lambda each: int(each[0])))


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    document = FastAPI.openapi(app)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    if "Error" not in schemas:
        for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error, which is not what comes
            schemas.pop(unused, None)
        schemas |= _COMPONENTS | {"Error": _ERROR}
    return document
