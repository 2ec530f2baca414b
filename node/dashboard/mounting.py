"""Puts the admin API and the dashboard on an application that serves HTTP already."""

from __future__ import annotations

import time
from typing import Final

from starlette.applications import Starlette

from ..admin.api import make_admin_api
from ..admin.feed import Feed
from ..admin.source import NetworkSource
from ..web.access import Access
from .app import make_dashboard

ADMIN_PATH: Final = "/p2p/v1"
DASHBOARD_PATH: Final = "/dashboard"
OWN_ACCESS: Final = (ADMIN_PATH, DASHBOARD_PATH)
"""Paths that the API's keys do not open, and that do not ask for them: they have the admin token."""


def mount(app: Starlette, source: NetworkSource, access: Access) -> None:
    """Mounts both, with one feed for all who look."""
    feed = Feed(source, time.monotonic)
    app.mount(ADMIN_PATH, make_admin_api(feed, access))
    app.mount(DASHBOARD_PATH, make_dashboard(feed, access, time.time))
