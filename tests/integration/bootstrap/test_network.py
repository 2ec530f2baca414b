"""The main job, end to end: real nodes, engines and sockets. An answer must not depend on how it came about."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError
from p2pserve.coordinator import Phase
from p2pserve.kvtransport.probing import probe
from p2pserve.kvtransport.probing.estimates import LinkEstimator
from p2pserve.kvtransport.probing.figures import LinkFigures, Source
from p2pserve.kvtransport.probing.probe import ProbeSettings
from p2pserve.kvtransport.probing.sites import SiteLinks
from p2pserve.kvtransport.wire.channel import parse_link_hello
from p2pserve.node import messages
from p2pserve.node.bundled.evaluate import held_out_sources
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.links.prober import Prober
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.text import TextModel
from p2pserve.node.replica.worker import Worker

from ..conftest import WAIT_LIMIT_S
from ..node.engine.answers.answers import greedy, prompts
from ..node.engine.figures import ATTEMPTS

pytestmark = pytest.mark.timeout(400)

TOKENS = 24


def test_answers_equal_those_of_transformers(cluster: Any, random_model: Path, tmp_path: Path) -> None:
    """Several prompts of 1 to 400 tokens at once over a prefill and a decode engine; codec raw."""
    text = TextModel(random_model)

    async def main() -> list[list[tuple[str, Any]]]:
        async with cluster(tmp_path, random_model, 2) as network:
            plan = (await network.wait_plan(2)).plan
            assert {replica.phase for replica in plan.replicas} == {Phase.PREFILL, Phase.DECODE}
            said: list[list[tuple[str, Any]]] = await network.ask_until_undisturbed(
                lambda skip: prompts(text, skip=skip), max_tokens=TOKENS
            )
        return said

    attempts = trio.run(main)
    for prompt, answer in itertools.chain(*attempts):
        ids = text.encode(prompt)
        assert answer.prompt_tokens == len(ids)
        assert answer.tokens == greedy(random_model, ids, TOKENS), f"prompt of {len(ids)} tokens"
    for prompt, answer in attempts[-1]:
        ids, figures = text.encode(prompt), answer.figures
        assert figures.recovered == ()
        assert figures.attempts == 1
        assert figures.prefill_node != figures.decode_node
        # 4 layers, K and V, 2 heads of 64 channels in float32
        assert figures.transfer.raw_bytes == len(ids) * 4 * 2 * 2 * 64 * 4
        once = figures.transfer.wire_bytes - figures.transfer.resent_bytes  # a busy machine acknowledges late
        assert figures.transfer.raw_bytes < once < figures.transfer.raw_bytes + 20_000
        assert 0 <= figures.transfer.hidden_fraction <= 1


def test_long_prompts_on_the_bundled_model(cluster: Any, tmp_path: Path) -> None:
    """Held-out Python of 1 to 1500 tokens, several at once, over four boxes: token for token as `transformers`."""
    text = TextModel(BUNDLED)
    ids = text.encode(held_out_sources()["argparse"])
    asked = [text.decoder().push(ids[50 : 50 + n]) for n in (1, 130, 700, 1100, 1500)]

    async def main() -> list[Any]:
        async with cluster(tmp_path, "bundled", 4) as network:
            await network.wait_plan(4)
            answers: list[Any] = await network.ask_all(asked, max_tokens=32)
        return answers

    for prompt, answer in zip(asked, trio.run(main), strict=True):
        ids = text.encode(prompt)
        assert answer.tokens == greedy(BUNDLED, ids, 32), f"prompt of {len(ids)} tokens"


def test_one_box_serves_alone_and_kv4_saves_bytes(cluster: Any, random_model: Path, tmp_path: Path) -> None:
    """One node is a mixed replica; a second one splits the work, and kv4 moves a fraction of the bytes."""
    text = TextModel(random_model)
    prompt = prompts(text, (300,))[0]
    expected = greedy(random_model, text.encode(prompt), TOKENS)

    async def main() -> None:
        async with cluster(tmp_path / "one", random_model, 1) as network:
            plan = (await network.wait_plan(1)).plan
            assert [replica.phase for replica in plan.replicas] == [Phase.MIXED]
            answer = await network.client.generate(network.nodes[0].peer, prompt, max_tokens=TOKENS)
            assert answer.tokens == expected
            assert answer.figures.prefill_node is None
            assert answer.figures.transfer is None
        async with cluster(tmp_path / "two", random_model, 2, codec="kv4") as network:
            await network.wait_plan(2)
            answer = await network.client.generate(network.nodes[0].peer, prompt, max_tokens=TOKENS)
            assert len(answer.tokens) == TOKENS
            elements = answer.figures.transfer.raw_bytes / 4
            assert answer.figures.transfer.wire_bytes * 8 / elements < 5.0

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trio.run(main)


def test_nodes_that_nobody_has_pinned_all_serve(cluster: Any, random_model: Path, tmp_path: Path) -> None:
    """What they do is the planner's choice, and it says why; one that leaves is planned without."""
    text = TextModel(random_model)
    asked = prompts(text, (1, 40, 200, 300))
    expected = [greedy(random_model, text.encode(prompt), TOKENS) for prompt in asked]

    async def main() -> None:
        async with cluster(tmp_path, random_model, 3, phases=(None,)) as network:
            plan = (await network.wait_plan(3)).plan
            assert any(line.startswith("planned for ") for line in plan.why)
            found = await network.ask_all(asked * 3, max_tokens=TOKENS)
            assert [answer.tokens for answer in found] == expected * 3
            used = {peer for answer in found for peer in (answer.figures.prefill_node, answer.figures.decode_node)}
            assert len(used - {None}) > 1
            network.stops[2].set()
            rest = {node.peer for node in network.nodes[:2]}
            with trio.fail_after(WAIT_LIMIT_S):
                while True:
                    status = await network.client.status(network.nodes[0].peer)
                    if set(status.plan.peers) == rest:
                        break
                    await trio.sleep(0.05)

    trio.run(main)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_killed_engine_changes_no_token(cluster: Any, random_model: Path, tmp_path: Path, victim: str) -> None:
    """kill -9 of either engine process in the middle of a request: same greedy tokens, none lost or repeated."""
    text = TextModel(random_model)
    prompt = prompts(text, (200,))[0]
    wanted = 200
    expected = greedy(random_model, text.encode(prompt), wanted)

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2) as network:
            plan = (await network.wait_plan(2)).plan
            peer = next(r.head for r in plan.replicas if r.phase.value == victim)
            pids: list[int] = []

            async def kill(count: int) -> None:
                if pids and count >= 3:
                    os.kill(pids.pop(), signal.SIGKILL)

            gateway = next(node.peer for node in network.nodes if node.peer != peer)

            async def interrupted() -> messages.RequestFigures:
                pids.append(await network.engine_pid(peer))
                if victim == "prefill":
                    await kill(3)  # the prompt's KV must still be on its way: the kill comes before the request
                answer = await network.client.generate(
                    gateway, prompt, max_tokens=wanted, deadline_s=WAIT_LIMIT_S, on_tokens=kill
                )
                assert not pids
                assert answer.error == ""
                assert answer.tokens == expected
                # The engine comes back, and with it the plan of two replicas.
                await network.wait_plan(2)
                figures: messages.RequestFigures = answer.figures
                return figures

            figures = await interrupted()
            if victim == "decode":
                if figures.attempts == 1:  # all of it was on its way before this process looked at its beginning
                    figures = await interrupted()
                assert figures.attempts >= 2
                assert any("SIGKILL" in line for line in figures.recovered)
            again = await network.client.generate(gateway, prompt, max_tokens=8)
            assert again.tokens == expected[:8]

    trio.run(main)


def test_an_engine_that_is_killed_twice_comes_back_and_status_says_so(
    cluster: Any, random_model: Path, tmp_path: Path
) -> None:
    text = TextModel(random_model)
    prompt = prompts(text, (20,))[0]
    expected = greedy(random_model, text.encode(prompt), 4)

    async def main() -> None:
        async with cluster(tmp_path, random_model, 1) as network:
            await network.wait_plan(1)
            peer = network.nodes[0].peer

            async def started(times: int) -> None:
                with trio.fail_after(WAIT_LIMIT_S):
                    while True:
                        (advert,) = [node.advert for node in (await network.status()).nodes if node.peer == peer]
                        if (advert.engine.state, advert.engine.starts) == ("ready", times):
                            return
                        await trio.sleep(0.02)

            for times in (1, 2):
                await started(times)
                os.kill(await network.engine_pid(peer), signal.SIGKILL)
            await started(3)
            told = [line for line in network.said if "engine restarting: " in line]
            assert len(told) == 2
            assert all("SIGKILL" in line for line in told)
            answer = await network.client.generate(peer, prompt, max_tokens=4)
            assert answer.tokens == expected

    trio.run(main)


def test_no_engine_left_is_a_clear_error_in_time(cluster: Any, random_model: Path, tmp_path: Path) -> None:
    """With the only node leaving, a request ends in an error before its deadline."""

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2) as network:
            status = await network.wait_plan(2)
            for stop in network.stops[1:]:
                stop.set()
            pid = await network.engine_pid(network.nodes[0].peer)
            os.kill(pid, signal.SIGSTOP)  # an engine that hangs is worse than one that dies
            try:
                answer = await network.client.generate(network.nodes[0].peer, "def f(", max_tokens=4, deadline_s=3)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert answer.finish == "error"
            assert answer.error.startswith(("deadline:", "no engine is left"))
            assert status.coordinator is not None

    trio.run(main)


def test_stop_strings_limits_and_bad_requests(cluster: Any, random_model: Path, tmp_path: Path) -> None:
    """What a gateway refuses, it refuses in one line that names the field; what it accepts, it honours."""
    text = TextModel(random_model)
    prompt = prompts(text, (64,))[0]

    async def main() -> None:
        async with cluster(tmp_path, random_model, 1) as network:
            await network.wait_plan(1)
            gateway, client = network.nodes[0].peer, network.client
            whole = await client.generate(gateway, prompt, max_tokens=40)
            assert whole.finish == "length"
            stop = whole.text[len(whole.text) // 2 :][:3]
            cut = await client.generate(gateway, prompt, max_tokens=40, stop=(stop,))
            assert cut.finish == "stop"
            assert cut.text == whole.text[: whole.text.index(stop)]
            seeded = [await client.generate(gateway, prompt, max_tokens=20, temperature=1.0, seed=5) for _ in (1, 2)]
            assert seeded[0].tokens == seeded[1].tokens
            bad: list[tuple[dict[str, Any], str]] = [
                ({"max_tokens": -1}, "max_tokens"),
                ({"max_tokens": 10_000}, "max_tokens"),
                ({"temperature": float("nan")}, "temperature"),
                ({"top_p": 0.0}, "top_p"),
                ({"seed": -1}, "seed"),
                ({"service": "another"}, "service"),
            ]
            for settings, field in bad:
                with pytest.raises(RemoteError) as refusal:
                    await client.generate(gateway, prompt, **settings)
                assert refusal.value.message.startswith(f"{field}:")
            for asked, field in (("", "prompt"), ("x = 1\n" * 2000, "prompt")):
                with pytest.raises(RemoteError) as refusal:
                    await client.generate(gateway, asked)
                assert refusal.value.message.startswith(f"{field}:")

    trio.run(main)


def test_leaving_drains_and_the_network_goes_on(cluster: Any, random_model: Path, tmp_path: Path) -> None:
    """A node that leaves finishes what it decodes; the plan then does without it."""
    text = TextModel(random_model)
    prompt = prompts(text, (64,))[0]
    wanted = 60
    expected = greedy(random_model, text.encode(prompt), wanted)

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2) as network:
            plan = (await network.wait_plan(2)).plan
            decode = next(r.head for r in plan.replicas if r.phase is Phase.DECODE)
            index = next(i for i, node in enumerate(network.nodes) if node.peer == decode)
            left = False

            async def leave(count: int) -> None:
                nonlocal left
                if count >= 2:
                    network.stops[index].set()
                    left = True

            gateway = network.nodes[1 - index].peer
            answer = await network.client.generate(gateway, prompt, max_tokens=wanted, on_tokens=leave)
            assert left
            assert answer.tokens == expected
            with trio.fail_after(WAIT_LIMIT_S):
                while True:
                    status = await network.client.status(gateway)
                    if status.plan is not None and [r.phase for r in status.plan.replicas] == [Phase.MIXED]:
                        break
                    await trio.sleep(0.05)
            assert (await network.client.generate(gateway, prompt, max_tokens=8)).tokens == expected[:8]

    trio.run(main)


def test_links_stay_warm_and_what_they_carry_is_told(
    cluster: Any, random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests over the same pair of nodes use the same connections; idle nodes measure their links by bursts, and
    every node hears of it."""
    accepted: Counter[bytes] = Counter()
    attach = Worker.attach

    def count(self: Worker, hello: bytes, connection: Any) -> bool:
        accepted[parse_link_hello(hello).link] += 1
        return attach(self, hello, connection)

    monkeypatch.setattr(Worker, "attach", count)
    hasty = partial(ProbeSettings, ping_every_s=0.5, retry_s=1.0, burst_bytes=16_000_000)
    monkeypatch.setattr(probe, "ProbeSettings", hasty)
    idle = trio.Event()  # a burst may teach a node to use more streams: not between the requests
    run, learn = Prober.run, LinkEstimator.on_transfer

    def learn_when_idle(self: LinkEstimator, sample: Any, *, now: float) -> bool:
        return idle.is_set() and learn(self, sample, now=now)  # so may what a transfer shows, on a busy machine

    async def run_when_idle(self: Prober) -> None:
        await idle.wait()
        await run(self)

    monkeypatch.setattr(Prober, "run", run_when_idle)
    monkeypatch.setattr(LinkEstimator, "on_transfer", learn_when_idle)
    text = TextModel(random_model)
    asked = [prompt for skip in range(ATTEMPTS) for prompt in prompts(text, (250, 300, 350), skip=skip)]
    told: list[list[int]] = []

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2) as network:
            await network.wait_plan(2)
            used: list[Counter[bytes]] = []
            for prompt in asked:
                if len(used) == 3:
                    break
                answer = await network.client.generate(network.nodes[0].peer, prompt, max_tokens=TOKENS)
                told.append(answer.tokens)
                if not answer.undisturbed:
                    continue
                assert list(answer.figures.transfer.paths) == ["direct"]
                assert answer.figures.transfer.usd == 0.0
                used.append(Counter(accepted))
            assert len(used) == 3
            assert len(used[0]) == 1  # one link, between the two engines
            assert used[0] == used[1] == used[2]
            idle.set()
            await measured(network)

    trio.run(main)
    assert told == [greedy(random_model, text.encode(prompt), TOKENS) for prompt in asked[: len(told)]]


async def measured(network: Any) -> None:
    """Wait until of every two nodes one has told of its link to the other, the one without a model included: a box
    that was just sent a burst sends none back for a while. Of links to one site that are alike, a node tells one."""
    peers = {network.bootstrap.peer, *(node.peer for node in network.nodes)}
    known = SiteLinks({}, {})
    with trio.move_on_after(WAIT_LIMIT_S) as wait:
        while True:
            status = await network.client.status(network.nodes[0].peer)
            tables = {node.peer: node.links for node in status.nodes if node.links is not None}
            told = {(peer, to): link for peer, table in tables.items() for to, link in table.links.items()}
            known = SiteLinks(told, {peer: table.site for peer, table in tables.items()})
            found = {
                frozenset(pair)
                for pair in itertools.permutations(peers, 2)
                if pair in known and known[pair].source is Source.MEASURED
            }
            if len(found) == len(peers) * (len(peers) - 1) // 2:
                break
            await trio.sleep(0.1)
    assert not wait.cancelled_caught, dict(known)
    for node in status.nodes:
        for link in node.links.links.values() if node.links is not None else ():
            assert 0 < link.one_stream_gbps <= link.capacity_gbps
            assert 0 < link.rtt_s < 1
            assert link.reachable


def test_kv_takes_the_way_through_a_node_without_a_model_where_that_is_faster(
    cluster: Any, random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node believes its direct links to be ten times slower than those to and from the bootstrap node."""
    slow = LinkFigures(rtt_s=0.001, one_stream_gbps=0.02, capacity_gbps=0.02)
    fast = LinkFigures(rtt_s=0.001, one_stream_gbps=2.0, capacity_gbps=2.0)
    relays: list[PeerId] = []
    taught: set[str] = set()
    learn = LinkKnowledge.learn

    def learn_this(self: LinkKnowledge, tables: dict[PeerId, messages.LinkTable], members: dict[PeerId, Any]) -> None:
        known = {relay: messages.LinkTable(links=dict.fromkeys(members, fast)) for relay in relays}
        learn(self, {**tables, **known}, members)
        self._estimators = {peer: LinkEstimator(fast if peer in relays else slow) for peer in members}
        if relays and len(members) == 2:
            taught.add(self.own)

    async def measure_nothing(self: Prober) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(LinkKnowledge, "learn", learn_this)
    monkeypatch.setattr(Prober, "run", measure_nothing)
    text = TextModel(random_model)
    asked = [prompt for skip in range(ATTEMPTS) for prompt in prompts(text, (200, 400), skip=skip)]
    told: list[list[int]] = []

    async def main() -> None:
        async with cluster(tmp_path, random_model, 2) as network:
            relay = network.bootstrap.peer
            relays.append(relay)
            await network.wait_plan(2)
            with trio.fail_after(WAIT_LIMIT_S):
                while not taught.issuperset(node.peer for node in network.nodes):  # noqa: ASYNC110 (nobody tells)
                    await trio.sleep(0.05)
            undisturbed = 0
            for prompt in asked:
                if undisturbed == 2:
                    break
                answer = await network.client.generate(network.nodes[0].peer, prompt, max_tokens=TOKENS)
                told.append(answer.tokens)
                if not answer.undisturbed:
                    continue
                undisturbed += 1
                figures = answer.figures.transfer
                assert figures.paths.get(relay, 0) >= figures.raw_bytes * 0.9
                assert relay not in (answer.figures.prefill_node, answer.figures.decode_node)
            assert undisturbed == 2

    trio.run(main)
    assert told == [greedy(random_model, text.encode(prompt), TOKENS) for prompt in asked[: len(told)]]
