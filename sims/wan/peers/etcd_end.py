"""A client of the etcd member in its box, for timing how soon all members know what one was told.

    python etcd_end.py PORT

It answers what `gossip_box` answers: a put to this member begins a number, and a watch on it sees one. It imports
the standard library alone.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

KEY = "p2pserve-number"
WAIT_S = 30.0
RETRY_S = 0.1


class EtcdMember:
    """Its HTTP gateway, and the numbers that a watch has seen."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v3"
        # Whatever proxy this machine has is not for a member in the same box.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._seen: dict[int, float] = {}
        self._news = threading.Condition()

    def put(self, number: int) -> None:
        """Returns when the cluster has agreed on it."""
        with self._post("/kv/put", {"key": _text(KEY), "value": _text(str(number))}) as response:
            response.read()

    def start_watching(self) -> None:
        """From a time on at which the member has answered. Raises OSError if it never does."""
        threading.Thread(target=self._watch, args=(self._open_watch(),), daemon=True).start()

    def _open_watch(self) -> Any:
        """From the first change on, so that nothing is missed by one that is opened anew."""
        until = time.monotonic() + WAIT_S
        while True:
            try:
                self.put(0)  # only a cluster with a leader takes it
                return self._post("/watch", {"create_request": {"key": _text(KEY), "start_revision": "1"}})
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)

    def wait_seen(self, number: int) -> float:
        """When the watch has first seen that number."""
        with self._news:
            if not self._news.wait_for(lambda: number in self._seen, WAIT_S):
                raise RuntimeError(f"number {number} was not seen within {WAIT_S:g} s")
            return self._seen[number]

    def _watch(self, response: Any) -> None:
        """A member that is short of processor time may end a watch, or say an error in place of news."""
        while True:
            with suppress(OSError, HTTPException, ValueError, KeyError):
                for line in response:
                    self._take(json.loads(line)["result"].get("events", ()), time.monotonic())
            response = self._open_watch()

    def _take(self, events: Any, now: float) -> None:
        with self._news:
            for event in events:
                self._seen.setdefault(int(base64.b64decode(event["kv"]["value"])), now)
            self._news.notify_all()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), method="POST")
        return self._opener.open(request, timeout=WAIT_S)


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def main(argv: list[str]) -> int:
    """Run the client; what goes wrong is said in one line."""

    def say(answer: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    member = EtcdMember(int(argv[0]))
    try:
        member.start_watching()
        say({"ready": True})
        for line in sys.stdin:
            order = json.loads(line)
            if order["op"] == "publish":
                began = time.monotonic()
                member.put(order["number"])
                say({"began": began})
            else:
                say({"ended": member.wait_seen(order["number"])})
    except (OSError, RuntimeError) as error:
        say({"error": f"etcd: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
