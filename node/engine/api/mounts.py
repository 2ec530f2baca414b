"""What is served beside vLLM's own routes on the same app: the admin API and the dashboard."""

from __future__ import annotations

from typing import Any

from ...admin.access import Access
from ...admin.asking import AskedNode
from ...dashboard.mounting import OWN_ACCESS
from ...dashboard.mounting import mount as mount_dashboard
from .agent_link import AgentLink, AgentRefused
from .protocol import ApiConfig


def mount(app: Any, link: AgentLink, config: ApiConfig) -> tuple[str, ...]:
    """Add routes of ours to vLLM's app (FastAPI); what they show, the agent is asked for over `link`. Returns the paths
    below which they look at keys of their own, as `/dashboard` does: API keys do not count there."""
    mount_dashboard(app, AskedNode(link.ask, AgentRefused), Access(config.admin_token))
    return OWN_ACCESS
