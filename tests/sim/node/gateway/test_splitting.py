"""The splitter of a node between gateways, its worker and a decode replica: the limit of two holds there, whatever
number of gateways asks; the split is chosen by how it stands at the decode replica at that moment."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.bootstrap.methods import Messenger
from p2pserve.coordinator.profile import StepSample
from p2pserve.coordinator.routing.balancer import ChunkLine, choose_split
from p2pserve.coordinator.routing.prefill_slots import SLOTS
from p2pserve.node import messages, methods
from p2pserve.node.engine import protocol
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.slot_desk import LEASE_S
from p2pserve.node.replica.splitting import SLOT_WAIT_S, PromptSplitter
from p2pserve.node.replica.worker import Worker
from p2pserve.node.requests.slot_messages import DecodeStateAnswer, DecodeStateQuery, SlotOpen, SlotOpened
from p2pserve.node.testing import READY, MemoryEngine, MemoryExchange, MemoryOutlets

from ....unit.node.replica.worker_world import MODEL, SERVICE, alone, part_of
from .world import elapse

P, D = PeerId("own"), PeerId("decode-node")
PROMPT = 400
STEP_TOKENS = 64


class Box:
    """A node with an engine in memory, and the splitter that answers for it."""

    def __init__(self, exchange: MemoryExchange, peer: PeerId) -> None:
        messenger = exchange.join(peer)
        transfers = KvTransfers(model=MODEL, outlets=MemoryOutlets(), messenger=messenger)
        self.worker = Worker(service=SERVICE, transfers=transfers, messenger=messenger, clock=trio.current_time)
        self.splitter = PromptSplitter(self.worker, model=MODEL, messenger=messenger)
        self.engine = MemoryEngine()
        self.engine.ready = replace(READY, step_tokens=STEP_TOKENS, block_tokens=16)
        self.worker.use(self.engine, Place(alone(peer), 0))

    def tell(self, running: int, free: int, *samples: StepSample) -> None:
        """What the engine says after a step."""
        told = protocol.Iterations(
            steps=1, seconds=0.1, longest_s=0.1, prefill_tokens=0, decode_tokens=0, decode_context=0, preemptions=0,
            samples=samples,
        )  # fmt: skip
        stats = protocol.EngineStats(running, 0, 0.5, free)
        self.worker.on_engine_message(protocol.Step(outputs=(), stats=stats, iterations=told))

    def end_prefill(self, request: str) -> None:
        self.worker.on_engine_message(
            protocol.Step(
                outputs=(protocol.NewTokens(f"prefill:{request}", (1,), "length"),),
                stats=protocol.EngineStats(0, 0, 0.0, 1000),
            )
        )


def virtually(main: Callable[[MemoryExchange, Box, Box], Awaitable[None]]) -> None:
    async def begin() -> None:
        exchange = MemoryExchange(latency_s=0.01)
        await main(exchange, Box(exchange, P), Box(exchange, D))

    trio.run(begin, clock=MockClock(autojump_threshold=0))


async def ask(gateway: Messenger, request: str, prompt_tokens: int = PROMPT) -> int:
    """Until there is a slot; returns the split."""
    body = SlotOpen(request=request, service=SERVICE, prompt_tokens=prompt_tokens, decode=D)
    while (answer := await gateway.request(P, methods.PREFILL_SLOT, body, 10.0)).split is None:
        pass
    return answer.split


async def send(gateway: Messenger, request: str, seed: int) -> None:
    await gateway.request(
        P,
        methods.PREFILL_OPEN,
        messages.PrefillOpen(
            request=request, service=SERVICE, prompt=(1, 2, 3), deadline_s=60.0, slices=(part_of(seed),)
        ),
        10.0,
    )


@pytest.mark.parametrize("gateways", [1, 4])
def test_at_most_two_requests_are_there_with_any_number_of_gateways(gateways: int) -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        there: set[str] = set()
        most = 0
        order: list[int] = []

        async def serve(gateway: Messenger, number: int) -> None:
            nonlocal most
            request = f"r{number}.1"
            await elapse(0.001 * number)
            await ask(gateway, request)
            order.append(number)
            there.add(request)
            most = max(most, len(there))
            assert prefill.worker.slots.used <= SLOTS
            await send(gateway, request, number)
            await elapse(1.0)
            there.remove(request)
            prefill.end_prefill(request)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(serve, exchange.join(PeerId(f"g{number % gateways}")), number)
        assert most == SLOTS
        assert order == list(range(20))
        assert prefill.worker.slots.used == 0

    virtually(main)


def test_the_split_is_chosen_by_how_it_stands_when_the_slot_is_free() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        splits: list[int] = []

        async def wait() -> None:
            splits.append(await ask(gateway, "late"))

        decode.tell(0, 1000)
        splits.extend([await ask(gateway, request) for request in "ab"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await elapse(1.0)
            decode.tell(STEP_TOKENS - 4, 600)  # four tokens a step are left for prompts
            prefill.worker.stop_request(gateway.peer_id, Role.WORKER, messages.StopRequest(request="a"))
        early, also_early, late = splits
        assert early == also_early
        assert 1 <= early < late

    virtually(main)


def test_what_the_decode_replica_says_of_itself() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))

        async def look() -> DecodeStateAnswer:
            return await gateway.request(D, methods.DECODE_STATE, DecodeStateQuery(service=SERVICE), 1.0)

        fresh = (await look()).state
        assert (fresh.decoding, fresh.context_tokens, fresh.free_tokens) == (0, 0, READY.kv_tokens)
        assert (fresh.block_tokens, fresh.step_tokens) == (16, STEP_TOKENS)
        decode.tell(7, 250)
        told = (await look()).state
        assert (told.decoding, told.context_tokens, told.free_tokens) == (7, READY.kv_tokens - 250, 250)
        decode.worker.limit_steps(48)  # by the plan
        assert (await look()).state.step_tokens == 48

    virtually(main)


def test_its_own_steps_correct_what_is_expected_of_the_device() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))

        async def look() -> ChunkLine:
            return (await gateway.request(D, methods.DECODE_STATE, DecodeStateQuery(service=SERVICE), 1.0)).chunk

        expected = await look()
        slow = [
            StepSample(3 * expected.seconds(context, 0), 1, STEP_TOKENS, 0, 0, context) for context in range(0, 400, 16)
        ]
        decode.tell(1, 900, *slow)
        assert await look() == expected  # until they have been fitted
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.worker.learner.run)
            await elapse(20.0)
            nursery.cancel_scope.cancel()
        assert (await look()).seconds(200, 0) == pytest.approx(3 * expected.seconds(200, 0), rel=0.02)

    virtually(main)


def test_without_the_word_of_the_decode_replica_all_of_the_prompt_is_computed_first() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        decode.worker.drain()
        assert await ask(gateway, "a") == PROMPT
        exchange.lost.add(D)
        assert await ask(gateway, "b") == PROMPT

    virtually(main)


def test_without_room_at_the_decode_replica_all_of_the_prompt_is_computed_first() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        decode.tell(2, PROMPT - 1)
        assert await ask(gateway, "a") == PROMPT
        decode.tell(2, PROMPT)
        assert await ask(gateway, "b") < PROMPT

    virtually(main)


def test_whoever_cannot_take_a_request_says_so() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        body = SlotOpen(request="a", service="another", prompt_tokens=9, decode=D)
        with pytest.raises(RemoteError, match="wrong-service"):
            await gateway.request(P, methods.PREFILL_SLOT, body, 1.0)
        prefill.worker.drain()
        with pytest.raises(RemoteError, match="draining"):
            await ask(gateway, "a")
        prefill.worker.resume()
        prefill.worker.engine_lost("ended")
        with pytest.raises(RemoteError, match="no-engine"):
            await ask(gateway, "a")
        assert prefill.worker.slots.used == 0

    virtually(main)


def test_an_engine_that_is_lost_frees_its_slots() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        for number, request in enumerate("ab"):
            await ask(gateway, request)
            await send(gateway, request, number)
        assert prefill.worker.slots.used == SLOTS
        prefill.worker.engine_lost("ended")
        assert prefill.worker.slots.used == 0

    virtually(main)


@pytest.mark.parametrize("how", ["stopped", "gateway lost", "transfer failed", "refused by the engine"])
def test_however_a_prefill_ends_its_slot_is_free(how: str) -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        worker = prefill.worker
        await ask(gateway, "a")
        await send(gateway, "a", 0)
        assert worker.slots.used == 1
        if how == "stopped":
            gateway.notify(P, methods.REQUEST_STOP, messages.StopRequest(request="a"))
        elif how == "gateway lost":
            worker.peer_lost(gateway.peer_id)
        elif how == "transfer failed":
            ticket = part_of(0).ticket
            worker.on_engine_message(
                protocol.TransferReport(
                    transfer=ticket.transfer, link=ticket.link, mode="serialised", delivered=False, reason="cut"
                )
            )
        else:
            refused = protocol.NewTokens("prefill:a", (), "refused", reason="too long")
            worker.on_engine_message(protocol.Step(outputs=(refused,), stats=protocol.EngineStats(0, 0, 0.0, 9)))
        assert worker.slots.used == 0

    virtually(main)


def test_a_slot_whose_gateway_is_gone_is_free_after_a_while() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gone, other = exchange.join(PeerId("gone")), exchange.join(PeerId("g"))
        for request in "ab":
            await ask(gone, request)
        began = trio.current_time()
        assert await ask(other, "c") >= 1
        assert trio.current_time() - began == pytest.approx(LEASE_S, abs=0.2)

    virtually(main)


def test_who_waits_is_answered_before_its_question_times_out() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        for number, request in enumerate("ab"):
            await ask(gateway, request)
            await send(gateway, request, number)
        began = trio.current_time()
        body = SlotOpen(request="c", service=SERVICE, prompt_tokens=9, decode=D)
        assert await gateway.request(P, methods.PREFILL_SLOT, body, 10.0) == SlotOpened()
        assert trio.current_time() - began == pytest.approx(SLOT_WAIT_S, abs=0.1)

    virtually(main)


def test_the_choice_is_the_balancers() -> None:
    async def main(exchange: MemoryExchange, prefill: Box, decode: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        decode.tell(5, 700)
        told = await gateway.request(D, methods.DECODE_STATE, DecodeStateQuery(service=SERVICE), 1.0)
        own = await prefill.splitter._known_lines(SERVICE)
        assert await ask(gateway, "a") == choose_split(PROMPT, own.prefill, told.chunk, told.state)

    virtually(main)
