"""A browser without a screen, driven over its own protocol on a pair of pipes: no driver, no port, no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # root in a container has no user namespace to put it in
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The program, if this machine has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    """The browser, or a page's own script, has raised."""


class Tab:
    """One page. `requests` are the addresses of all that it has loaded, `faults` what its console has complained of."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._rest, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.faults: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT_S
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def resize(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """What the page is seen on."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def open(self, url: str) -> None:
        """Load a page with its scripts."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Look at the page until this is true there; a busy machine may take long."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if self.evaluate(f"!!({expression})"):
                return
            time.sleep(0.05)
        text = self.evaluate("document.body.innerText")
        raise BrowserError(f"{expression} has not become true; the page says: {text}")

    def press(self, key: str, **more: Any) -> None:
        """One key, as from a keyboard."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        told: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def point_at(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        box = f"(() => {{const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        x, y = self.evaluate(f"{box} return [b.x + b.width / 2, b.y + b.height / 2]}})()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type_into(self, selector: str, text: str) -> None:
        """Give an element the focus, and it this text."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """What the page looks like, as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._receive], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError("the browser does not answer")
            chunk = os.read(self._receive, 1 << 16)
            if not chunk:
                raise BrowserError("the browser has ended")
            self._rest += chunk
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.faults.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(told["exceptionDetails"].get("exception", told["exceptionDetails"])))


@contextmanager
def open_tab(program: str, folder: Path) -> Iterator[Tab]:
    """A browser with one page, and a profile of its own in `folder`."""
    (low_in, ours_out), (ours_in, low_out) = os.pipe(), os.pipe()
    theirs_in, theirs_out = (fcntl.fcntl(low, fcntl.F_DUPFD, 10) for low in (low_in, low_out))
    os.close(low_in)
    os.close(low_out)
    # The protocol's pipes are descriptors 3 and 4 of the browser; those here are kept clear of these numbers.
    command = ["/bin/sh", "-c", f'exec "$@" 3</proc/self/fd/{theirs_in} 4>/proc/self/fd/{theirs_out}', "sh"]
    process = subprocess.Popen(
        [*command, program, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        os.close(ours_out)  # at which it ends, with all its processes
        os.close(ours_in)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
