"""An engine without a network, which the demos ask for the same: its answers are those to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import trio

from ...node.engine import protocol
from ...node.engine.agent_side.engine_link import EngineLink
from ..errors import DemoFailed


@final
@dataclass(slots=True)
class SingleEngine:
    """Requests to an engine of our own, one at a time."""

    _tokens: list[int] = field(default_factory=list)
    _done: trio.Event = field(default_factory=trio.Event)

    def on_message(self, message: protocol.FromEngine) -> None:
        """Take what the engine says."""
        if isinstance(message, protocol.Step):
            for output in message.outputs:
                self._tokens += output.tokens
                if output.finish is not None:
                    self._done.set()

    async def ask(self, link: EngineLink, prompt: tuple[int, ...], sampling: protocol.Sampling) -> tuple[int, ...]:
        """The tokens of the answer. Raises DemoFailed when the engine dies."""
        self._tokens, self._done = [], trio.Event()
        link.send(
            protocol.Submit(
                request=f"single-{len(prompt)}",
                prompt=prompt,
                sampling=sampling,
                deadline_s=300.0,
            )
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_fail_when_gone, link)
            await self._done.wait()
            nursery.cancel_scope.cancel()
        return tuple(self._tokens)


async def _fail_when_gone(link: EngineLink) -> None:
    raise DemoFailed(f"the single engine {await link.wait_gone()}")
