"""The dashboard over a network that is only modelled: `python -m p2pserve.node.dev.preview --boxes 8`.

For whoever works on it: no engine, no peers, and an API whose model repeats what it is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from ..dashboard.mounting import DASHBOARD_PATH, mount
from ..web.access import Access
from .showcase import SERVICE, Showcase

WORD_S = 0.03


async def show_models(request: Request) -> Response:
    """As an OpenAI API would."""
    return JSONResponse({"object": "list", "data": [{"id": SERVICE, "object": "model"}]})


async def chat(request: Request) -> Response:
    """Repeats the last message, a word at a time. `!cut` breaks the stream off after three words, `!error` ends it with
    an error."""
    asked = (await request.json())["messages"][-1]["content"]
    return StreamingResponse(_repeat(asked), media_type="text/event-stream")


async def _repeat(text: str) -> AsyncIterator[str]:
    words = text.split(" ")
    for number, word in enumerate(words):
        await asyncio.sleep(WORD_S)
        yield _event({"choices": [{"delta": {"content": word if not number else f" {word}"}}]})
        if number == 2 and "!cut" in text:
            return
        if number == 2 and "!error" in text:
            yield _event({"error": {"message": "no replica of the service is left"}})
            return
    yield _event({"choices": [], "usage": {"completion_tokens": len(words)}})
    yield "data: [DONE]\n\n"


def _event(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boxes", type=int, default=8, help="boxes of the modelled network (8)")
    parser.add_argument("--per-site", type=int, default=3, help="boxes of each of its sites (3)")
    parser.add_argument("--port", type=int, default=8080, help="where to listen on loopback (8080; 0: any)")
    parser.add_argument("--admin-token", help="ask for this token")
    options = parser.parse_args()
    app = Starlette(
        routes=[
            Route("/", lambda request: RedirectResponse(f"{DASHBOARD_PATH}/")),
            Route("/v1/models", show_models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
    )
    mount(app, Showcase(options.boxes, time.time, per_site=options.per_site), Access(options.admin_token))
    with socket.create_server(("127.0.0.1", options.port)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}{DASHBOARD_PATH}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


if __name__ == "__main__":
    main()
