"""A network with two models, each on a box of its own: whichever box or gateway is asked, a request is answered by the
model that it names. Real engines; clients over HTTP and of the SDK."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import openai
import pytest

from p2pserve.sdk import Client, InvalidRequest

from ...conftest import make_random_model
from .servers import Server, events_of, start_gateway, start_join, start_p2pserve, wait_ready
from .test_two_boxes import fetch, wait_for

pytestmark = [pytest.mark.beside, pytest.mark.timeout(500)]

CODE: Final[dict[str, Any]] = {"model": "bundled", "prompt": "def fibonacci(n):", "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class TwoServices:
    """Boxes, a gateway that is none of them, and what each model answers when it is asked at its own box."""

    code: Server
    noise: Server
    gateway: Server
    client: str
    answers: dict[str, str]

    @property
    def doors(self) -> tuple[Server, Server, Server]:
        return self.code, self.noise, self.gateway


def text_of(server: Server, model: str) -> str:
    answer = server.post("/v1/completions", {**CODE, "model": model})
    assert answer.status_code == 200, answer.text
    told: Any = answer.json()
    assert told["model"] == model
    return str(told["choices"][0]["text"])


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoServices]:
    folder = tmp_path_factory.mktemp("two-services")
    model = str(make_random_model(folder / "noise"))
    with ExitStack() as stack:
        code = stack.enter_context(start_p2pserve(folder / "one"))
        token = wait_for(lambda: re.search(r"p2p_worker_[\w-]+", code.said), "the token of the first box")[0]
        noise = stack.enter_context(start_join(folder / "two", token, model=model))
        client = re.findall(r"p2p_client_[\w-]+", code.said)[0]
        gateway = stack.enter_context(start_gateway(folder / "laptop", client))
        for server in (code, noise, gateway):
            wait_ready(server)
        wait_for(lambda: len(list_models(gateway)) == 2 and len(list_models(noise)) == 2, "both models are listed")
        answers = {"bundled": text_of(code, "bundled"), "noise": text_of(noise, "noise")}
        assert answers["bundled"] != answers["noise"]
        yield TwoServices(code, noise, gateway, client, answers)


def list_models(server: Server) -> list[str]:
    return [each["id"] for each in server.ask("GET", "/v1/models").json().get("data", ())]


def test_every_box_and_gateway_lists_both_models(network: TwoServices) -> None:
    for server in network.doors:
        assert sorted(list_models(server)) == ["bundled", "noise"]


def test_each_service_has_a_plan_over_its_own_boxes(network: TwoServices) -> None:
    services = {node["id"]: node["service"] for node in fetch(network.code, "nodes")["data"]}
    assert len(set(services.values())) == 2
    for service in services.values():
        plan = fetch(network.noise, f"plan?service={quote(service)}")
        boxes = {stage["peer"] for replica in plan["replicas"] for stage in replica["stages"]}
        assert (plan["service"], {services[box] for box in boxes}) == (service, {service})


def test_a_model_answers_the_same_at_every_door(network: TwoServices) -> None:
    for server in network.doors:
        assert {model: text_of(server, model) for model in network.answers} == network.answers


def test_two_clients_ask_two_models_at_once_at_one_door(network: TwoServices) -> None:
    with ThreadPoolExecutor(2) as clients:
        asked = [(model, clients.submit(text_of, network.noise, model)) for model in ("bundled", "noise") * 4]
        assert [found.result() for _, found in asked] == [network.answers[model] for model, _ in asked]


def test_an_answer_of_another_boxes_model_streams(network: TwoServices) -> None:
    answer = network.noise.post("/v1/completions", {**CODE, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    assert events[-1] == "[DONE]"
    assert len(events) > 2
    with openai.OpenAI(base_url=f"{network.noise.url}/v1", api_key="any") as client:
        pieces = client.completions.create(**CODE, stream=True)
        assert "".join(each.choices[0].text for each in pieces) == network.answers["bundled"]


def test_clients_of_the_sdk_name_the_service(network: TwoServices) -> None:
    with Client(bootstrap=network.client) as client:
        for model, text in network.answers.items():
            assert client.generate(CODE["prompt"], max_tokens=8, service=model).text == text
        with pytest.raises(InvalidRequest, match=r"nobody serves prose; this network serves bundled \(.*\), noise "):
            client.generate("a", service="prose")


def test_a_model_that_is_not_there_is_answered_with_those_that_are(network: TwoServices) -> None:
    for server in network.doors:
        answer = server.post("/v1/completions", {**CODE, "model": "prose"})
        assert answer.status_code == 404
        told = answer.json()["error"]["message"]
        assert told == "model: this network does not serve prose; it serves bundled, noise"


def test_a_model_whose_last_box_is_lost_may_be_asked_for_again_and_the_other_goes_on(network: TwoServices) -> None:
    network.noise.lose()
    answer = wait_for(lambda: refusal_of(network.code), "the loss is noticed")
    assert int(answer["retry-after"]) >= 1
    assert text_of(network.code, "bundled") == network.answers["bundled"]
    assert text_of(network.gateway, "bundled") == network.answers["bundled"]


def refusal_of(server: Server) -> Any:
    answer = server.post("/v1/completions", {**CODE, "model": "noise"})
    return answer.headers if answer.status_code == 503 else None
