"""What the engine's bench measures of transfers: how much of a link a KV transfer gets, and what a step pays.

The KV of one prompt goes from one engine to the other again and again, in `raw` and all at once. The sender has the
prompt in its cache, so that it computes one position of it each time, and the receiver is asked for another prompt of
the same length, of which it has nothing: so what is measured is the transfer and not the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec
import trio

from ....kvtransport.errors import TransferError
from .. import protocol
from ..trials.trial import Trial, TrialEngine

HANDED: Final = 4001  # one more than whole blocks of a GPU: the last position is always computed
BLOCK: Final = 128  # a multiple of vLLM's blocks on every device
AT_ONCE: Final = 4  # transfers on the link while a step is measured: the sender computes for all of them in one step
ASKED: Final = 16  # tokens of the prompt beside: too few for an engine to learn how fast it prefills and to give KV up


class TransferRate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second of one KV transfer, and of as many plain bytes on a link of the same kind."""

    kv: float
    link: float


class BesideTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per token of one request, alone and while KV comes in, or goes out, all the time."""

    alone: float
    beside: float


def transferable_tokens(max_model_len: int, kv_tokens: int) -> int:
    """Length of the prompt whose KV is transferred: 4,001, or what the model and a cache of `kv_tokens` positions have
    room for, AT_ONCE of them and more at the same time; one more than whole blocks in any case."""
    room = min(max_model_len - 1, kv_tokens // (AT_ONCE + 1))
    return HANDED if room >= HANDED else max(0, room - 1) // BLOCK * BLOCK + 1


@final
class TransferBench:
    """Hands KV from `prefill` to `decode`. `prompts(count, tokens)` makes prompts that nobody has seen."""

    def __init__(
        self,
        trial: Trial,
        prefill: TrialEngine,
        decode: TrialEngine,
        prompts: Callable[[int, int], Sequence[Sequence[int]]],
    ) -> None:
        self._trial = trial
        self._prefill = prefill
        self._decode = decode
        self._prompts = prompts
        self._link = trial.join(decode)
        smaller = min(prefill.ready.kv_tokens, decode.ready.kv_tokens)
        self.tokens = transferable_tokens(decode.ready.max_model_len, smaller)
        (self._sent,) = prompts(1, self.tokens)

    async def transfer_prompt(self, count: int = 1) -> list[protocol.TransferReport]:
        """So many transfers at once. Raises EngineError, TransferError."""
        asked = []
        for prompt in self._prompts(count, self.tokens):
            send, receive = self._trial.transfer_ends(self._link, "raw", self._decode.ready, pacing="serialised")
            request = self._decode.submit(prompt, 1, receive=receive, receive_tokens=self.tokens)
            asked.append((request, send))
        begun = [self._prefill.submit(self._sent, 1, send=send) for _, send in asked]
        reports = []
        for sender, (request, send) in zip(begun, asked, strict=True):
            await self._prefill.answer(sender)
            reports.append(await self._prefill.report(send[0].ticket.transfer))
            answer = await self._decode.answer(request)
            if answer.cached < self.tokens - 1:
                raise TransferError(f"only {answer.cached} of {self.tokens} positions were transferred")
        return reports

    async def measure_rates(self, plain: Callable[[int], float], repeats: int) -> list[TransferRate]:
        """One KV transfer and plain bytes in turn; `plain(size)` sends so many and returns bytes per second."""
        await self._prefill.generate(self._sent, 1)  # its blocks are cached from here on
        (warm,) = await self.transfer_prompt()
        plain(warm.wire_bytes)
        pairs = []
        for _ in range(repeats):
            (report,) = await self.transfer_prompt()
            pairs.append(TransferRate(kv=report.wire_bytes / report.span_s, link=plain(report.wire_bytes)))
        return pairs

    async def steps(self, engine: TrialEngine, tokens: int, repeats: int) -> list[BesideTransfer]:
        """Of one of the two engines: KV comes in beside, or goes out. Each of `repeats` pairs writes `tokens` twice."""

        async def step_ms() -> float:
            (prompt,) = self._prompts(1, ASKED)
            answer = await engine.generate(prompt, tokens)
            return (answer.last_at - answer.first_at) / (tokens - 1) * 1e3

        async def step_beside_ms() -> float:
            measured: list[float] = []

            async def measure() -> None:
                measured.append(await step_ms())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(measure)
                while not measured:
                    await self.transfer_prompt(AT_ONCE)
            return measured[0]

        await step_ms()
        return [BesideTransfer(alone=await step_ms(), beside=await step_beside_ms()) for _ in range(repeats)]
