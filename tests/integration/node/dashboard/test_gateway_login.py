"""Logging in to the dashboard through a gateway, in a browser: a front on a port, and a box that has the pages."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio

from p2pserve.bootstrap import Address, Role
from p2pserve.node.http.admission import FrontRules

from ....unit.node.http.http_world import Box, echo, http_world
from .browser import Tab, find_browser, open_tab
from .test_browser import TOKEN, serve

BROWSER = find_browser()
RULES = FrontRules(role=Role.ADMIN, admin_token=TOKEN, realm="12D3KooWgateway")
LIMIT_S = 100.0

pytestmark = [
    pytest.mark.beside,
    pytest.mark.skipif(BROWSER is None, reason="needs a Chromium (Debian: apt-get install chromium)"),
]


def test_a_token_logs_in_at_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(port: int) -> None:
        async def connect(box: Box) -> trio.abc.Stream:
            return await trio.open_tcp_stream("127.0.0.1", port)

        monkeypatch.setattr(Box, "connect", connect)
        with trio.fail_after(LIMIT_S):
            async with http_world(echo, rules=RULES, token_role=Role.ADMIN) as world:
                at = await world.nursery.start(world.front.serve, Address("127.0.0.1", 0))
                await trio.to_thread.run_sync(look, f"http://{at}", tmp_path)

    with serve("--boxes", "2") as site:
        port = urlsplit(site).port
        assert port is not None
        trio.run(main, port)


def look(url: str, folder: Path) -> None:
    with open_tab(str(BROWSER), folder) as tab:
        tab.open(f"{url}/dashboard/requests")
        assert tab.evaluate("location.pathname") == "/dashboard/login"
        assert tab.evaluate("getComputedStyle(document.querySelector('form')).display") == "grid"
        tab.type_into("#token", "wrong")
        tab.press("Enter")
        tab.wait_for("document.getElementById('fault')")
        assert cookies(tab) == []
        tab.type_into("#token", TOKEN)
        tab.press("Enter")
        tab.wait_for("document.querySelector('.tiles')")
        (cookie,) = cookies(tab)
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/dashboard")
        assert tab.evaluate("document.cookie") == ""
        first = "document.querySelector('.events li').innerText"
        tab.open(f"{url}/dashboard/events")
        tab.wait_for(f"{first} !== {json.dumps(tab.evaluate(first))}")  # news come through the gateway, too
        tab.evaluate("fetch('/dashboard/logout', {method: 'POST'}).then(() => { document.title = 'out' })")
        tab.wait_for("document.querySelector('#token')")  # the page is told, and loads itself anew
        assert cookies(tab) == []
        assert {urlsplit(address).netloc for address in tab.requests} == {urlsplit(url).netloc}
        assert [fault for fault in tab.faults if "401" not in fault] == []


def cookies(tab: Tab) -> list[dict[str, object]]:
    found: list[dict[str, object]] = tab.call("Network.getCookies")["cookies"]
    return found
