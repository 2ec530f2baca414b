"""Which service of the network a request is for: this box's own, another one, or none that there is. No I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from ...web.listening import HttpRefusal
from .protocol import ServiceState

MODELS: Final = "/v1/models"
UNPLACED_RETRY_S: Final = 5.0
_MAX_NAMED: Final = 16


class ServedAt(Enum):
    """Who answers a request."""

    HERE = "here"
    ELSEWHERE = "elsewhere"


def find_service(
    model: str | None, names: Sequence[str], state: ServiceState, *, is_carried: bool
) -> ServedAt | HttpRefusal:
    """Who serves the model that a request names; one that names none is for this box's own, called `names` or as its
    service is. What was carried here from another node goes no further."""
    if (model is None or model in (*names, *state.own_names)) and not state.removed:
        return ServedAt.HERE
    if not state.others and not state.removed:
        return ServedAt.HERE  # of a network with one model vLLM itself says what there is
    if model is None:
        return HttpRefusal(404, f"model: say which; this network serves {_name_all(names, state)}")
    found = next((other for other in state.others if model in other.names), None)
    if found is None:
        return HttpRefusal(
            404, f"model: this network does not serve {model[:200]}; it serves {_name_all(names, state)}"
        )
    if is_carried or not found.is_placed:
        text = f"model: no box serves {model[:200]} now, though this network knows it; ask again"
        return HttpRefusal(503, text, UNPLACED_RETRY_S)
    return ServedAt.ELSEWHERE


def rename(body: bytes, model: str) -> bytes:
    """A request's body of JSON, for a model of another name: of two models of one name the service tells which is
    meant, and vLLM does not know it."""
    return json.dumps({**json.loads(body), "model": model}, separators=(",", ":")).encode()


def add_services(listed: bytes, names: Sequence[str], state: ServiceState) -> bytes:
    """vLLM's list of models with those of the network's other services, each under the first of its names, and without
    those that no box serves; this box's own also as the catalogue calls it."""
    found: dict[str, Any] = json.loads(listed)
    own = found["data"]
    entry = [{**own[0], "id": state.entry}] if state.entry and state.entry not in names else []
    others = [
        {**own[0], "id": other.names[0], "root": other.names[-1], "max_model_len": other.max_model_len or None}
        for other in state.others
        if other.is_placed and other.names[0] not in names
    ]
    here = [] if state.removed else [*own, *entry]
    return json.dumps({**found, "data": [*here, *others]}, separators=(",", ":")).encode()


def _name_all(names: Sequence[str], state: ServiceState) -> str:
    own = set() if state.removed else {names[0]}
    known = sorted(own | {other.names[0] for other in state.others})
    more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
    return (", ".join(known[:_MAX_NAMED]) or "nothing") + more
