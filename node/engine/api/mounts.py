"""What is served beside vLLM's own routes on the same app: the admin API, the dashboard, and the metrics
of the node."""

from __future__ import annotations

from typing import Any

from ...admin.asking import AskedNode
from ...admin.source import SourceError
from ...dashboard.mounting import OWN_ACCESS
from ...dashboard.mounting import mount as mount_dashboard
from ...web.access import Access
from .agent_link import AgentLink, AgentRefused
from .metrics import App, NodeMetrics
from .protocol import ApiConfig


def mount(app: Any, link: AgentLink, config: ApiConfig) -> tuple[App, tuple[str, ...]]:
    """Add routes of ours to vLLM's app (FastAPI); what they show, the agent is asked for over `link`. Returns it
    with the node's metrics behind vLLM's, and the paths below which routes look at keys of their own, as `/dashboard`
    does: API keys do not count there."""
    node = AskedNode(link.ask, AgentRefused)
    mount_dashboard(app, node, Access(config.admin_token))
    return NodeMetrics(app, node.metrics, SourceError), OWN_ACCESS
