"""`p2pserve price`: what this box costs, and from now on."""

from __future__ import annotations

import json
from types import SimpleNamespace

from ...coordinator.names import name_of
from ...node.box.errors import NodeError
from ...node.owner.pricing import describe_price
from ...node.owner.questions import OwnerQuestion, ask_node
from .own_nodes import find_own_nodes


def price(arguments: SimpleNamespace) -> int:
    """`p2pserve price`."""
    home = arguments.home.expanduser()
    names = find_own_nodes(home, arguments.node)
    # Several nodes of one box have its price together.
    share = arguments.usd / len(names) if arguments.usd is not None else None
    answers = [ask_node(home / name, OwnerQuestion(usd_per_hour=share)) for name in names]
    prices = [answer.usd_per_hour for answer in answers]
    if None in prices:
        raise NodeError(f"home {home}: the node there is of another release; let it leave and join again")
    total = sum(price for price in prices if price is not None)
    nodes = [answer.node for answer in answers]
    if arguments.format == "json":
        print(json.dumps({"node": nodes[0], "usd_per_hour": total, **({"nodes": nodes} if len(nodes) > 1 else {})}))
    else:
        print(f"{', '.join(map(name_of, nodes))}: {describe_price(total)}{' together' if len(nodes) > 1 else ''}")
    return 0
