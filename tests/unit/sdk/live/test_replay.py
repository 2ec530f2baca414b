"""A trace replayed through a client, and which gateways took its requests, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import trio
import trio.testing

from p2pserve.sdk.live import simulated
from p2pserve.sdk.live.network import find_gateways, replay
from p2pserve.sdk.live.simulated import simulated_network
from p2pserve.sims.scenario import SimSettings
from p2pserve.sims.world import simulate

from .runs import SETTINGS, TRACE, live, network_of, plan


class FakeStream:
    """The answer to a request: its tokens at once."""

    def __init__(self, prompt: int, output: int, request: str) -> None:
        figures = SimpleNamespace(
            prompt_tokens=prompt,
            completion_tokens=output,
            attempts=1 + (request == str(len(TRACE))),
            prefill_node="p",
            decode_node="q",
            id=request,
        )
        self.result = SimpleNamespace(figures=figures)
        self._output = output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *told: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        await trio.lowlevel.checkpoint()
        yield SimpleNamespace(tokens=(1,) * self._output)


class FakeClient:
    """Of a network whose node r took the requests with an even number, g the others, but for one that is forgotten."""

    def __init__(self) -> None:
        self.services: list[str | None] = []

    def generate(self, prompt: str, *, max_tokens: int, service: str | None, **options: object) -> FakeStream:
        self.services.append(service)
        return FakeStream(prompt.count("x"), max_tokens, str(len(self.services)))

    async def trace(self, request: str) -> Any:
        await trio.lowlevel.checkpoint()
        return None if request == "1" else SimpleNamespace(gateway="r" if int(request) % 2 == 0 else "g")


@pytest.mark.parametrize("service", [None, "opt-6.7b-emulated"])
def test_all_requests_ask_the_service_that_they_are_for(service: str | None) -> None:
    client: Any = FakeClient()

    async def run() -> tuple[str, ...]:
        replayed = await replay(client, TRACE, lambda line: None, service=service)
        assert replayed.nodes == ("q",) * len(TRACE)
        assert replayed.served == dict.fromkeys(range(len(TRACE) - 1), ("p", "q")), "one has needed two attempts"
        assert (replayed.outcomes.completed == np.ones(len(TRACE))).all()
        return await find_gateways(client, replayed.ids)

    assert trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.0)) == ("r", "g")
    assert client.services == [service] * len(TRACE)


def test_the_simulated_requests_come_to_the_gateway_that_took_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears a second late how replicas stand, but for its own requests, as in the network."""
    service, told = network_of(5.0).service, list[SimSettings]()

    def note(*run: Any, settings: SimSettings, **rest: Any) -> Any:
        told.append(settings)
        return simulate(*run, settings=settings, **rest)

    monkeypatch.setattr(simulated, "simulate", note)
    for gateways in ((), ("q", "p")):
        network = simulated_network(SETTINGS, replace(live(1.0), gateways=gateways), service)
        network.run(TRACE, [(0.0, plan())])
    assert [(settings.gateways, settings.report_s) for settings in told[-2:]] == [(("p", "q"), 0.0), (("q",), 1.0)]
    assert all(settings.admission is not None for settings in told), "gateways hold back what engines would let wait"
    replace(network_of(5.0), holds_back=False).run(TRACE, [(0.0, plan())])
    assert told[-1].admission is None
