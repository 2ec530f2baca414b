"""The dashboard in a browser: what it loads, that it follows the network, by keyboard, on a phone, in both themes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .browser import Tab, find_browser, open_tab

BROWSER = find_browser()
TOKEN = "correct horse battery"

pytestmark = [
    pytest.mark.beside,
    pytest.mark.skipif(BROWSER is None, reason="needs a Chromium (Debian: apt-get install chromium)"),
]


@contextmanager
def serve(*options: str) -> Iterator[str]:
    """A preview's address, as it says it."""
    command = [sys.executable, "-m", "p2pserve.node.dev.preview", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with serve("--boxes", "8") as address:
        yield address


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(str(BROWSER), tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(autouse=True)
def desktop(tab: Tab) -> None:
    tab.resize(1280, 900)
    tab.requests.clear()
    tab.faults.clear()


@pytest.mark.parametrize("page", ["", "?view=matrix", "plan", "requests", "events", "chat", "boxes/brave-otter"])
def test_a_page_loads_without_a_fault_and_from_nowhere_else(tab: Tab, site: str, page: str) -> None:
    tab.open(f"{site}/{page}")
    tab.wait_for("document.querySelector('h1') && getComputedStyle(document.querySelector('h1')).fontWeight === '600'")
    assert tab.requests
    origin = site.removesuffix("/dashboard")
    assert [address for address in tab.requests if not address.startswith(origin)] == []
    assert tab.faults == []


@pytest.mark.parametrize("page", ["", "?view=matrix", "plan", "requests", "events", "chat", "boxes/brave-otter"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_scrolls_down_and_not_aside(tab: Tab, site: str, page: str, dark: bool) -> None:
    tab.resize(390, 844, dark=dark, phone=True)
    tab.open(f"{site}/{page}")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    shade = sum(map(int, re.findall(r"\d+", ground)[:3]))
    assert (shade < 150) is dark
    assert tab.faults == []


def test_the_page_follows_the_network(tab: Tab, site: str) -> None:
    tab.open(f"{site}/events")
    first = "document.querySelector('.events li').innerText"
    before = tab.evaluate(first)
    tab.wait_for(f"{first} !== {before!r}")
    assert tab.faults == []


def test_a_tab_that_nobody_sees_does_not_ask(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    tab.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    tab.wait_for("document.hidden")
    tab.evaluate(
        "window.asked = 0; window.realFetch = fetch; window.fetch = (...a) => {window.asked++; return realFetch(...a)}"
    )
    tab.evaluate("window.later = false; setTimeout(() => window.later = true, 3500)")
    tab.wait_for("window.later")
    assert tab.evaluate("window.asked") <= 1  # the one that was on its way
    tab.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait_for("window.asked >= 2")


def test_a_lost_connection_is_told_and_found_again(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    tab.evaluate("window.realFetch = fetch; window.fetch = async () => {throw new TypeError('gone')}")
    tab.wait_for("document.getElementById('state').textContent === 'no connection, trying again'")
    tab.evaluate("window.fetch = window.realFetch")
    tab.wait_for("document.getElementById('state').textContent === 'amber-otter'")


def test_everything_is_reached_by_keyboard(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    seen = []
    for _ in range(40):
        tab.press("Tab")
        seen.append(
            tab.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )
    assert seen[0] == "To the content"
    assert {"Network", "Plan", "Requests", "Events", "Chat", "Map", "Matrix", "amber-otter, prefill"} <= set(seen)
    tab.evaluate("document.querySelector('svg.map.wide a.spot').focus()")
    tab.press("Enter")
    tab.wait_for("location.pathname.includes('/boxes/')")


def test_what_has_the_focus_says_what_it_is(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    tab.press("Tab")
    tab.evaluate("document.querySelector('svg.map.wide a.spot').focus()")
    tab.wait_for("!document.getElementById('tip').hidden")
    assert "NVIDIA" in tab.evaluate("document.getElementById('tip').textContent")
    assert tab.evaluate("document.querySelectorAll('svg.map.wide .curve.lit').length") == 7
    tab.press("Escape")
    assert tab.evaluate("document.getElementById('tip').hidden")


def test_what_is_pointed_at_says_what_it_is(tab: Tab, site: str) -> None:
    tab.open(f"{site}/?view=matrix")
    tab.point_at(".matrix td.band-1, .matrix td.band-2, .matrix td.band-3")
    tab.wait_for("!document.getElementById('tip').hidden")
    assert "Gb/s" in tab.evaluate("document.getElementById('tip').textContent")


def test_every_control_has_a_name(tab: Tab, site: str) -> None:
    for page in ("", "requests", "events", "chat"):
        tab.open(f"{site}/{page}")
        assert tab.evaluate(NAMELESS) == []


NAMELESS = """[...document.querySelectorAll('a, button, input, select, textarea')]
  .filter(e => !(e.getAttribute('aria-label') || e.innerText.trim() || e.labels?.length)).map(e => e.outerHTML)"""


def test_the_theme_is_kept(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.open(f"{site}/plan")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.evaluate("document.getElementById('theme').click(); localStorage.clear()")


def test_texts_can_be_read(tab: Tab, site: str) -> None:
    """All text has a contrast of at least 4.5 with what is behind it, in both themes."""
    for dark in (False, True):
        tab.resize(1280, 900, dark=dark)
        for page in ("", "?view=matrix", "plan", "requests"):
            tab.open(f"{site}/{page}")
            assert tab.evaluate(CONTRAST) == []


CONTRAST = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length && c[3] !== 0) return c } return [255, 255, 255] };
  const poor = new Set();
  for (const e of document.querySelectorAll('main *, header *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    const style = getComputedStyle(e);
    if (!own || !e.getClientRects().length || style.fontSize === '0px' || e.closest('svg')) continue;
    const [a, b] = [light(parse(style.color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.add(`${e.tagName}.${e.className} ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return [...poor];
})()"""


def test_a_chat_streams_and_tells_its_figures(tab: Tab, site: str) -> None:
    tab.open(f"{site}/chat")
    tab.wait_for("document.querySelector('[name=model]').value === 'Qwen/Qwen3-32B'")
    tab.type_into("#question", "one <b>two</b> three ```\ncode\n``` end")
    tab.press("Enter")
    tab.wait_for("document.querySelector('#turns .assistant .figures')")
    answer = tab.evaluate("document.querySelector('#turns .assistant').innerText")
    assert answer.startswith("one <b>two</b> three")
    assert "tokens" in answer
    assert tab.evaluate("document.querySelectorAll('#turns b').length") == 0
    assert tab.evaluate("document.getElementById('question').value") == ""
    assert tab.faults == []


def test_a_chat_survives_a_broken_stream(tab: Tab, site: str) -> None:
    tab.open(f"{site}/chat")
    tab.wait_for("document.querySelector('[name=model]').value")
    tab.type_into("#question", "a b c !cut never comes")
    tab.press("Enter")
    tab.wait_for("!document.getElementById('again').hidden")
    assert tab.evaluate("document.querySelector('#turns .assistant').innerText") == "a b c"
    assert tab.evaluate("document.getElementById('again').textContent") == "Go on"
    assert "Go on continues it" in tab.evaluate("document.getElementById('chat-state').textContent")
    tab.evaluate("document.getElementById('again').click()")
    tab.wait_for("document.querySelector('#turns .assistant').innerText.startsWith('a b ca b c')")
    assert tab.evaluate("document.querySelectorAll('#turns li').length") == 2


def test_a_chat_tells_what_went_wrong_and_is_stopped(tab: Tab, site: str) -> None:
    tab.open(f"{site}/chat")
    tab.wait_for("document.querySelector('[name=model]').value")
    tab.type_into("#question", "a b c !error d")
    tab.press("Enter")
    tab.wait_for("document.getElementById('chat-state').textContent === 'no replica of the service is left'")
    tab.evaluate("document.getElementById('clear').click()")
    assert tab.evaluate("document.querySelectorAll('#turns li').length") == 0
    tab.type_into("#question", "word " * 2000)
    tab.press("Enter")
    tab.wait_for("document.querySelector('#turns .assistant')?.innerText")
    tab.evaluate("document.getElementById('stop').click()")
    tab.wait_for("document.getElementById('chat-state').textContent === 'Stopped.'")
    assert tab.evaluate("document.querySelector('#turns .assistant').innerText").startswith("word")


def test_a_token_logs_in(tab: Tab) -> None:
    with serve("--boxes", "2", "--admin-token", TOKEN) as site:
        tab.open(f"{site}/requests")
        assert tab.evaluate("location.pathname") == "/dashboard/login"
        tab.type_into("#token", "wrong")
        tab.press("Enter")
        tab.wait_for("document.getElementById('fault')")
        tab.type_into("#token", TOKEN)
        tab.press("Enter")
        tab.wait_for("document.querySelector('.tiles')")
        tab.evaluate("document.querySelector('form[action$=logout] button').click()")
        tab.wait_for("document.getElementById('token')")


def test_sixty_boxes_are_drawn_in_time(tab: Tab) -> None:
    with serve("--boxes", "60") as site:
        tab.open(f"{site}/?view=matrix&sites=open")
        assert tab.evaluate("document.querySelectorAll('.matrix td[class]').length") == 59 * 59
        tab.open(f"{site}/")
        assert tab.evaluate("document.querySelectorAll('svg.map.wide a.spot').length") == 6
        assert tab.faults == []
