"""`p2pserve price`: what this box costs, and from now on."""

from __future__ import annotations

import json
from types import SimpleNamespace

from ...coordinator.names import name_of
from ...node.box.errors import NodeError
from ...node.owner.pricing import describe_price
from ...node.owner.questions import OwnerQuestion, ask_node
from .own_nodes import find_own_node


def price(arguments: SimpleNamespace) -> int:
    """`p2pserve price`."""
    home = arguments.home.expanduser()
    home /= find_own_node(home, arguments.node)
    answer = ask_node(home, OwnerQuestion(usd_per_hour=arguments.usd))
    if answer.usd_per_hour is None:
        raise NodeError(f"home {home}: the node there is of another release; let it leave and join again")
    if arguments.format == "json":
        print(json.dumps({"node": answer.node, "usd_per_hour": answer.usd_per_hour}))
    else:
        print(f"{name_of(answer.node)}: {describe_price(answer.usd_per_hour)}")
    return 0
