"""Replicas that say whether they take a request into their pool: policy `splitwise` at a gateway, and the desk of a
node with one and with four gateways."""

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, RemoteError, RequestTimeout, Role
from p2pserve.bootstrap.methods import Messenger
from p2pserve.coordinator import Demand, LatencyProfile, Phase, PhaseCost, PhaseFit, Route
from p2pserve.coordinator.routing.pools import LEASE_S, MOST_REFUSALS, PoolClaim, PoolLimits, PoolState, Work
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node import messages, methods
from p2pserve.node.engine import protocol
from p2pserve.node.messages import LinkTable
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.pool_desk import PoolDesk
from p2pserve.node.replica.worker import Worker
from p2pserve.node.requests.questions import CLAIM_TIMEOUT_S
from p2pserve.node.requests.slot_messages import PoolAnswer, PoolAsk
from p2pserve.node.testing import READY, MemoryEngine, MemoryExchange, MemoryOutlets

from ....unit.node.replica.worker_world import MODEL, SAMPLING, SERVICE, alone, part_of
from .world import (
    ANSWER,
    CLIENT,
    D2,
    LATENCY_S,
    P2,
    PROMPT_TOKENS,
    STEP_S,
    D,
    P,
    World,
    elapse,
    figures_of,
    open_world,
)
from .world import virtually as virtually_at_gateway

OWN, LIMIT = PeerId("own"), 1000
LIMITS = PoolLimits(LIMIT, 100)
FULL_QUEUE = 8192  # the limit of prompt tokens that is set by default


def state(pool: Phase, tokens: int = 0, requests: int = 0, decodes: int = 0, free: int = 9000) -> PoolState:
    return PoolState(pool=pool, requests=requests, prefill_tokens=tokens, kv_free_tokens=free, decodes=decodes)


def asked_of(world: World) -> list[PeerId]:
    return [peer for kind, peer, _ in world.opened if kind == "claim"]


def opened_at(world: World) -> list[tuple[str, PeerId]]:
    return [(kind, peer) for kind, peer, _ in world.opened if kind != "claim"]


IDLE = {P: state(Phase.PREFILL), P2: state(Phase.PREFILL), D: state(Phase.DECODE), D2: state(Phase.DECODE)}


def test_both_replicas_of_a_route_are_asked_at_the_same_time() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="splitwise") as world:
            world.pools |= {P: IDLE[P], D: IDLE[D]}
            last = await world.answer()
            assert last.error == ""
            assert world.tokens() == ANSWER[:12]
            assert [kind for kind, _, _ in world.opened] == ["claim", "claim", "decode", "prefill"]
            claims = [body.claim for _, _, body in world.opened if isinstance(body, PoolAsk)]
            length = len(PROMPT_TOKENS)
            assert set(claims) == {
                PoolClaim(replica=P, work=Work.PROMPT, pool=Phase.PREFILL, prompt_tokens=length),
                PoolClaim(replica=D, work=Work.TOKEN, pool=Phase.DECODE, prompt_tokens=length),
            }
            # the same id throughout, so that the place is told from others'
            assert len({body.request for _, _, body in world.opened}) == 1  # type: ignore[attr-defined]
            # one round trip more than the two opens, and the prompt, whose token is shown at once
            assert figures_of(last).ttft_s == pytest.approx(3 * LATENCY_S + STEP_S)

    virtually_at_gateway(main)


def test_a_refusal_sends_it_to_the_next_choice_and_the_next_request_there_at_once() -> None:
    async def main() -> None:
        async with open_world(P, P2, D, policy="splitwise") as world:
            world.pools |= {**IDLE, P: state(Phase.PREFILL, FULL_QUEUE, 3)}
            world.pools.pop(D2)
            assert (await world.answer()).error == ""
            assert opened_at(world) == [("decode", D), ("prefill", P2)]
            assert Counter(asked_of(world)) == {P: 1, D: 1, P2: 1}, "who has accepted is not asked again"
            world.opened.clear()
            assert (await world.answer()).error == ""
            assert set(asked_of(world)) == {P2, D}, "p has said how it stands"

    virtually_at_gateway(main)


def test_a_token_machine_is_borrowed_when_prompt_machines_say_that_they_are_full() -> None:
    async def main() -> None:
        async with open_world(P, D, D2, policy="splitwise") as world:
            world.pools |= {P: state(Phase.PREFILL, FULL_QUEUE, 3), D: IDLE[D], D2: IDLE[D2]}
            assert (await world.answer()).error == ""
            ((kind, peer),) = opened_at(world)
            assert kind == "decode"
            assert peer in (D, D2)
            *_, last = (body.claim for _, _, body in world.opened if isinstance(body, PoolAsk))
            assert (last.work, last.pool) == (Work.BOTH, Phase.DECODE)
            if peer != D:
                assert D in world.sent("request.stop"), "its place is free again"

    virtually_at_gateway(main)


def test_where_all_refuse_the_shortest_queue_takes_it_after_a_bounded_number_of_tries() -> None:
    async def main() -> None:
        async with open_world(P, P2, D, D2, policy="splitwise") as world:
            world.pools |= {name: state(each.pool, FULL_QUEUE, 3, free=0) for name, each in IDLE.items()}
            started = trio.current_time()
            assert (await world.answer()).error == ""
            assert len(asked_of(world)) <= MOST_REFUSALS + 1
            assert [kind for kind, _ in opened_at(world)] == ["decode"]
            assert trio.current_time() - started < (MOST_REFUSALS + 2) * LATENCY_S + 15 * STEP_S

    virtually_at_gateway(main)


def test_an_earlier_release_is_asked_once_and_serves_as_before() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="splitwise") as world:
            assert (await world.answer()).error == ""
            assert opened_at(world) == [("decode", D), ("prefill", P)]
            assert sorted(asked_of(world)) == [D, P]

    virtually_at_gateway(main)


def test_by_predicted_times_one_of_several_gateways_asks_who_computes_the_prompt() -> None:
    """Two others have requests; their reports say nothing of them yet, but the replica does."""

    async def main() -> None:
        async with open_world(P, P2, D, policy="predicted") as world:
            here, view = PeerId("gateway"), world.view
            fit = PhaseFit(cost=PhaseCost(step_s=0.01, token_s=0.001), samples=9, error=0.01)
            for peer, known in view.adverts.items():
                view.adverts[peer] = replace(
                    known, fits=1, profile=LatencyProfile(prefill=fit, decode=fit),
                    demand=Demand(requests_s=1.0, arrival_cv=1.0, lengths=((20, 20),)),
                )  # fmt: skip
            view.adverts[here] = replace(view.adverts[D], engine=None)
            near = LinkFigures(rtt_s=0.001, one_stream_gbps=1.0, capacity_gbps=1.0)
            view.links_told = {here: LinkTable(links=dict.fromkeys((P, P2, D), near))}
            world.pools |= {P: state(Phase.PREFILL, 10**6, 9), P2: IDLE[P2], D: IDLE[D]}
            assert (await world.answer()).error == ""
            assert asked_of(world) == [P, P2]
            assert opened_at(world)[-1] == ("prefill", P2)
            assert all(body.claim.most_ahead is not None for _, _, body in world.opened if isinstance(body, PoolAsk))
            world.opened.clear()
            assert (await world.answer()).error == ""
            assert opened_at(world)[-1] == ("prefill", P2)
            assert asked_of(world) == [P2], "p has said how it stands"

    virtually_at_gateway(main)


def test_after_a_refusal_a_replica_may_be_asked_for_a_slot() -> None:
    async def main() -> None:
        async with open_world(P, P2, D) as world:
            claim = PoolClaim(replica=P, work=Work.PROMPT, pool=Phase.PREFILL, prompt_tokens=6, most_ahead=0)
            length = len(PROMPT_TOKENS)
            asks = Route(prefill=P, decode=D, split=length, claims=(claim,))
            shared = Route(prefill=P2, decode=D, split=length, splits_there=True)
            routes, heard = iter([asks, shared]), list[dict[PoolClaim, bool]]()

            def find(*args: object) -> Route:
                heard.append(dict(args[-1]))  # type: ignore[call-overload]
                return next(routes)

            world.gateway._routes.find = find  # type: ignore[assignment, method-assign]
            world.pools |= {P: state(Phase.PREFILL, 900, 9)}
            world.splits[P2] = lambda: split_after(length - 2)
            assert (await world.answer()).error == ""
            assert heard == [{}, {claim: False}]
            assert [(kind, peer) for kind, peer, _ in world.opened] == [
                ("claim", P), ("slot", P2), ("decode", D), ("prefill", P2)
            ]  # fmt: skip
            (opened,) = (body for _, _, body in world.opened if isinstance(body, messages.PrefillOpen))
            assert len(opened.prompt) == length - 2

    async def split_after(tokens: int) -> int:
        return tokens

    virtually_at_gateway(main)


@pytest.mark.parametrize("policy", ["plan", "predicted", "round-robin"])
def test_other_policies_do_not_ask(policy: str) -> None:
    async def main() -> None:
        async with open_world(P, D, policy=policy) as world:
            assert (await world.answer()).error == ""
            assert asked_of(world) == []

    virtually_at_gateway(main)


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_replica_that_does_not_answer_counts_as_one_that_refuses(how: str) -> None:
    async def main() -> None:
        async with open_world(P, P2, D, policy="splitwise") as world:
            world.pools |= {P: IDLE[P], P2: IDLE[P2], D: IDLE[D]}
            plain = world._request

            async def request(peer: PeerId, method: str, body: messages.Message, *, timeout: float) -> messages.Message:
                if (peer, method) == (P, "pool.claim"):
                    if how == "lost":
                        await elapse(LATENCY_S)
                        world.lose(P)
                        raise RemoteError("gone", "the box is gone")
                    assert timeout == CLAIM_TIMEOUT_S
                    await elapse(timeout)
                    raise RequestTimeout(f"{peer} did not answer")
                return await plain(peer, method, body, timeout=timeout)

            world._request = request  # type: ignore[method-assign]
            assert (await world.answer()).error == ""
            assert opened_at(world) == [("decode", D), ("prefill", P2)]

    virtually_at_gateway(main)


def test_a_client_that_leaves_while_replicas_are_asked_frees_the_places() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="splitwise") as world:
            world.pools |= {P: IDLE[P], D: IDLE[D]}
            name = await world.ask()
            await elapse(LATENCY_S / 2)
            assert sorted(asked_of(world)) == [D, P]
            world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
            await elapse(3 * LATENCY_S)
            assert sorted(world.sent("request.stop")) == [D, P]
            assert opened_at(world) == []

    virtually_at_gateway(main)


# ---- the desk of a node ---------------------------------------------------------------------------------------


class Box:
    """A node with an engine in memory, and the desk that answers for it."""

    def __init__(self, exchange: MemoryExchange, home: Phase) -> None:
        messenger = exchange.join(OWN)
        transfers = KvTransfers(model=MODEL, outlets=MemoryOutlets(), messenger=messenger)
        self.worker = Worker(service=SERVICE, transfers=transfers, messenger=messenger, clock=trio.current_time)
        self.desk = PoolDesk(self.worker, limits=LIMITS, messenger=messenger)
        self.desk.home = home
        self.engine = MemoryEngine()
        self.engine.ready = replace(READY, kv_tokens=10_000)
        self.worker.use(self.engine, Place(alone(OWN), 0))

    def write(self, name: str, finish: str | None = None) -> None:
        """A token of an answer, or the one that ends a prefill."""
        output = protocol.NewTokens(name, (1,), finish)
        stats = protocol.EngineStats(0, 0, 0.0, 9000)
        self.worker.on_engine_message(protocol.Step(outputs=(output,), stats=stats))

    def pool(self) -> Phase:
        return self.desk.state(10_000).pool


def virtually(home: Phase, main: Callable[[MemoryExchange, Box], Awaitable[None]]) -> None:
    async def begin() -> None:
        exchange = MemoryExchange(latency_s=0.01)
        await main(exchange, Box(exchange, home))

    trio.run(begin, clock=MockClock(autojump_threshold=0))


async def claim(gateway: Messenger, request: str, work: Work, pool: Phase, tokens: int = 300) -> PoolAnswer:
    asked = PoolClaim(replica=OWN, work=work, pool=pool, prompt_tokens=tokens)
    return await gateway.request(OWN, methods.POOL_CLAIM, PoolAsk(request=request, service=SERVICE, claim=asked), 10.0)


async def send_prompt(gateway: Messenger, request: str, seed: int, tokens: int = 300) -> None:
    body = messages.PrefillOpen(
        request=request, service=SERVICE, prompt=(1,) * tokens, deadline_s=60.0, slices=(part_of(seed),)
    )
    await gateway.request(OWN, methods.PREFILL_OPEN, body, 10.0)


async def send_whole(gateway: Messenger, request: str, tokens: int = 300) -> None:
    body = messages.DecodeOpen(
        request=request, service=SERVICE, prompt=(1,) * tokens, sampling=SAMPLING, deadline_s=60.0, receive_tokens=0,
        codec="raw",
    )  # fmt: skip
    await gateway.request(OWN, methods.DECODE_OPEN, body, 10.0)


@pytest.mark.parametrize("gateways", [1, 4])
def test_prompts_never_queue_beyond_the_limit_with_any_number_of_gateways(gateways: int) -> None:
    async def main(exchange: MemoryExchange, box: Box) -> None:
        most, refused = 0, 0

        async def serve(gateway: Messenger, number: int) -> None:
            nonlocal most, refused
            request = f"r{number}.1"
            await elapse(0.001 * number)
            while not (await claim(gateway, request, Work.PROMPT, Phase.PREFILL)).accepted:
                refused += 1
                await elapse(0.1)
            await send_prompt(gateway, request, number)
            most = max(most, box.desk.state(10_000).prefill_tokens)
            await elapse(0.5)
            box.write(f"prefill:{request}", "length")

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(serve, exchange.join(PeerId(f"g{number % gateways}")), number)
        assert most == 900, "three of them, and a fourth would pass it"
        assert refused > 20
        assert box.desk.state(10_000).prefill_tokens == 0
        assert len(box.worker.slots.claims) == 0

    virtually(Phase.PREFILL, main)


def test_a_token_machine_is_borrowed_while_it_has_prompts_to_compute_and_then_at_home() -> None:
    async def main(exchange: MemoryExchange, box: Box) -> None:
        one, other = exchange.join(PeerId("g1")), exchange.join(PeerId("g2"))
        assert (await claim(one, "a.1", Work.BOTH, Phase.DECODE)).accepted
        answer = await claim(other, "b.1", Work.BOTH, Phase.MIXED)
        assert (answer.accepted, answer.state.pool) == (False, Phase.DECODE), "a claim alone moves no machine"
        await send_whole(one, "a.1")
        answer = await claim(other, "b.1", Work.TOKEN, Phase.DECODE)
        assert (answer.accepted, answer.state) == (False, state(Phase.MIXED, 300, 1, 1, 10_000))
        assert (await claim(other, "b.1", Work.BOTH, Phase.MIXED)).accepted
        box.write("decode:a.1")
        assert box.pool() is Phase.DECODE, "it still decodes: that is its work"
        assert (await claim(other, "c.1", Work.TOKEN, Phase.DECODE)).accepted

    virtually(Phase.DECODE, main)


def test_a_prompt_machine_is_borrowed_while_it_decodes() -> None:
    async def main(exchange: MemoryExchange, box: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        await send_whole(gateway, "a.1", 3)  # of a release that does not ask
        assert box.pool() is Phase.MIXED
        answer = await claim(gateway, "b.1", Work.PROMPT, Phase.PREFILL)
        assert (answer.accepted, answer.state.pool) == (False, Phase.MIXED)
        box.write("decode:a.1", "length")
        assert box.pool() is Phase.PREFILL
        assert (await claim(gateway, "b.1", Work.PROMPT, Phase.PREFILL)).accepted

    virtually(Phase.PREFILL, main)


def test_a_gateway_that_claims_and_sends_nothing_moves_no_machine_and_keeps_no_place() -> None:
    async def main(exchange: MemoryExchange, box: Box) -> None:
        hostile, honest = exchange.join(PeerId("h")), exchange.join(PeerId("g"))
        for number in range(50):
            await claim(hostile, f"h{number}.1", Work.BOTH, Phase.DECODE)
            assert box.pool() is Phase.DECODE
        assert not (await claim(honest, "a.1", Work.BOTH, Phase.DECODE)).accepted, "its limit is claimed"
        assert (await claim(honest, "a.1", Work.TOKEN, Phase.DECODE)).accepted
        await elapse(LEASE_S)
        assert (await claim(honest, "b.1", Work.BOTH, Phase.DECODE)).accepted
        assert len(box.worker.slots.claims) == 1
        hostile.notify(OWN, methods.REQUEST_STOP, messages.StopRequest(request="b.1"))
        await elapse(0.1)
        assert len(box.worker.slots.claims) == 1, "of another gateway"
        honest.notify(OWN, methods.REQUEST_STOP, messages.StopRequest(request="b.1"))
        await elapse(0.1)
        assert len(box.worker.slots.claims) == 0

    virtually(Phase.DECODE, main)


def test_another_service_and_a_node_that_leaves_take_nothing() -> None:
    async def main(exchange: MemoryExchange, box: Box) -> None:
        gateway = exchange.join(PeerId("g"))
        asked = PoolClaim(replica=OWN, work=Work.PROMPT, pool=Phase.PREFILL, prompt_tokens=9)
        with pytest.raises(RemoteError, match="serves"):
            await gateway.request(OWN, methods.POOL_CLAIM, PoolAsk(request="a", service="x", claim=asked), 10.0)
        box.worker.drain()
        with pytest.raises(RemoteError, match="draining"):
            await claim(gateway, "a", Work.PROMPT, Phase.PREFILL)

    virtually(Phase.PREFILL, main)
