"""Views of modelled networks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from p2pserve.node.admin.source import NetworkSnapshot
from p2pserve.node.dashboard.view import View
from p2pserve.node.dev.showcase import Showcase
from p2pserve.node.observing.summaries import summarise_links

NOW = 1_800_000_000.0


def network(boxes: int, per_site: int = 3) -> Showcase:
    return Showcase(boxes, lambda: NOW, per_site=per_site)


def view_of(showcase: Showcase, query: Mapping[str, str] | None = None, **more: Any) -> View:
    links = summarise_links(showcase.status(NOW), NOW)
    return View(snapshot=showcase.look(NOW), links=links, base="/dashboard", query=query or {}, **more)


def empty_view(**more: Any) -> View:
    return View(snapshot=NetworkSnapshot(time=NOW, answered_by="12D3KooWalone"), base="/dashboard", **more)


def without_links(view: View) -> View:
    return View(snapshot=view.snapshot, base=view.base, query=view.query, name=view.name)


def with_nodes(view: View, **changes: Any) -> View:
    """The same with these fields of every box changed."""
    nodes = tuple(replace(node, **changes) for node in view.snapshot.nodes)
    return View(
        snapshot=replace(view.snapshot, nodes=nodes), links=view.links, base=view.base, query=view.query, name=view.name
    )
