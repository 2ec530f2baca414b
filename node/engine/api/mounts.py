"""What is served beside vLLM's own routes on the same app."""

from __future__ import annotations

from typing import Any

from .agent_link import AgentLink


def mount(app: Any, link: AgentLink) -> tuple[str, ...]:
    """Add routes of ours to vLLM's app (FastAPI); what they show, the agent is asked for over `link`. Returns the paths
    below which they look at keys of their own, as `/dashboard` does: API keys do not count there."""
    return ()
