"""The head's end of a pipeline, against a stage that the test plays."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from p2pserve.kvtransport.wire.channel import LinkHello, LinkRole
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.pipe import Pipe, PipeSettings, greet
from p2pserve.kvtransport.wire.tickets import issue_link
from p2pserve.node.engine.pipeline.executor import PipelineExecutor
from p2pserve.node.engine.pipeline.pipes import ActivationsOutput, PipeInput, PipeReader
from p2pserve.node.engine.pipeline.remote import RemoteWorker
from p2pserve.node.engine.pipeline.scheduler import PipelineScheduler, is_all_scheduled
from p2pserve.node.engine.pipeline.stage import check_pipeline
from p2pserve.node.engine.pipeline.stage_workers import StageWorkers
from p2pserve.node.engine.pipeline.vocabulary import CODEC, Activations, Call, CallFailed, CallResult
from p2pserve.node.engine.protocol import EngineConfig, PipeEnd
from p2pserve.node.engine.settings import PIPELINE_DEFAULTS, PipelineSettings
from p2pserve.node.engine.stage_pipes import PipeConnections, PipelineError, StageLost, open_pipes

PATIENT = PipeSettings(beat_s=30, lost_s=60)


def piped() -> tuple[Pipe, Pipe]:
    ours, theirs = socket.socketpair()
    ticket = issue_link(60, secrets.token_bytes)
    hello = LinkHello(ticket.link, bytes(16), LinkRole.SENDER)

    def accept() -> Pipe:
        theirs.recv(48, socket.MSG_WAITALL)
        return greet(theirs, ticket, hello, dials=False, timeout=20, settings=PATIENT)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(accept)
        return greet(ours, ticket, hello, dials=True, timeout=20, settings=PATIENT), other.result(20)


class Local:
    """Stands in for the head's own worker."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self.calls.append("execute_model")
        return None if scheduler_output.num_scheduled_tokens else ModelRunnerOutput([], {})

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def sample_tokens(self, grammar_output: object) -> ModelRunnerOutput:
        self.calls.append("sample_tokens")
        return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(finished_recving={"a"}))

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)


class Setting:
    """A head of two stages; `other` is the far end of its control pipe."""

    def __init__(self, settings: PipelineSettings = PIPELINE_DEFAULTS) -> None:
        self.lost: list[PipelineError] = []
        pipe, self.other = piped()
        self.stage = RemoteWorker("stage 1", pipe, self.lost.append, settings)
        self.head: Any = object.__new__(PipelineExecutor)
        self.head.workers = StageWorkers()
        self.head.workers.worker = Local()
        self.head.kv_output_aggregator = None
        self.head.stages = (self.stage,)

    def heard(self) -> Call:
        call = CODEC.decode(self.other.receive())
        assert isinstance(call, Call)
        return call

    def say(self, message: object) -> None:
        self.other.send(CODEC.encode(message))

    def step(self, tokens: int = 1) -> Any:
        """A batch, as vLLM's engine core starts one."""
        scheduled = SchedulerOutput.make_empty()
        scheduled.num_scheduled_tokens = {"a": tokens} if tokens else {}
        scheduled.total_num_scheduled_tokens = tokens
        first = self.head.execute_model(scheduled, non_block=True)
        return self.head.sample_tokens(None, non_block=True) if tokens else first


LOOKS = PipelineSettings(look_s=20.0, look_on_one_core=True)


@pytest.fixture
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    made = Setting(getattr(request, "param", PipelineSettings()))
    yield made
    made.other.close()
    made.stage.close("")


def output(token: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(["a"], {"a": 0}, [[token]])


def test_batches_are_told_before_those_ahead_are_answered(setting: Setting) -> None:
    steps = [setting.step(), setting.step()]
    calls = [setting.heard() for _ in range(2)]
    assert [call.method for call in calls] == ["run_batch"] * 2
    for token, call in enumerate(calls):
        setting.say(CallResult(call.number, output(token)))
    assert [step.result().sampled_token_ids for step in steps] == [[[0]], [[1]]]
    assert not setting.lost


def test_a_batch_with_a_grammar_is_sampled_when_what_may_come_next_is_known(setting: Setting) -> None:
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens, scheduled.has_structured_output_requests = {"a": 1}, True
    setting.head.execute_model(scheduled, non_block=True)
    computed = setting.heard()
    assert computed.method == "compute_batch"
    grammar = GrammarOutput(["a"], np.array([[5]], np.int32), [0])
    step = setting.head.sample_tokens(grammar, non_block=True)
    sampled = setting.heard()
    assert sampled.method == "sample_batch"
    assert sampled.args[0].structured_output_request_ids == ["a"]
    assert sampled.args[0].grammar_bitmask.tolist() == [[5]]
    setting.say(CallResult(computed.number, None))
    setting.say(CallResult(sampled.number, output(3)))
    assert step.result().sampled_token_ids == [[3]]
    assert setting.step() is not None
    assert setting.heard().method == "run_batch"


def test_a_lone_request_under_way_makes_no_empty_batches() -> None:
    def request(computed: int) -> Any:
        return SimpleNamespace(num_computed_tokens=computed, num_tokens_with_spec=8)

    assert is_all_scheduled([request(8), request(9)])
    assert not is_all_scheduled([request(8), request(7)])
    found: Any = object.__new__(PipelineScheduler)
    found.requests, found.finished_req_ids, found.connector, found.ec_connector = {"a": None}, set(), None, None
    found.num_waiting_for_streaming_input, found._pause_state = 0, None
    found.running, found.waiting, found.kv_holding_waiting = [request(8)], [], []
    assert not found.has_requests()
    found.finished_req_ids = {"b"}  # the stages must be told to forget it
    assert found.has_requests()
    found.finished_req_ids, found.waiting = set(), [object()]
    assert found.has_requests()
    found.waiting, found.running = [], [request(7)]
    assert found.has_requests()


def test_a_step_without_tokens_is_answered_at_once(setting: Setting) -> None:
    step = setting.step(tokens=0)
    call = setting.heard()
    assert call.method == "run_batch"
    setting.say(CallResult(call.number, output(5)))
    assert step.result().sampled_token_ids == [[5]]


@pytest.mark.parametrize("setting", [LOOKS], indirect=True)
def test_the_head_keeps_its_layers_warm_while_it_looks_for_an_answer(setting: Setting) -> None:
    calls = setting.head.workers.worker.calls
    for delay_s in (0, 0.05):  # what has come soon is looked for the next time
        assert "warm_up" not in calls
        step = setting.step()
        number = setting.heard().number
        threading.Timer(delay_s, setting.say, (CallResult(number, output(7)),)).start()
        assert step.result().sampled_token_ids == [[7]]
    assert "warm_up" in calls


def test_what_all_connectors_say_is_joined(setting: Setting) -> None:
    class Aggregator:
        def aggregate(self, outputs: list[ModelRunnerOutput], output_rank: int) -> list[ModelRunnerOutput]:
            assert output_rank == 1
            return outputs

    setting.head.kv_output_aggregator = Aggregator()
    step = setting.step()
    setting.say(CallResult(setting.heard().number, output(7)))
    mine, theirs = step.result()
    assert mine.kv_connector_output.finished_recving == {"a"}
    assert theirs.sampled_token_ids == [[7]]


def test_other_calls_return_what_each_stage_says_the_heads_first(setting: Setting) -> None:
    future = setting.head.collective_rpc("get_supported_tasks", non_block=True)
    setting.say(CallResult(setting.heard().number, ("generate", "more")))
    assert future.result() == [("generate",), ("generate", "more")]


class Box:
    """The first worker of a stage and a remote, whose end of the pipe the test has."""

    def __init__(self) -> None:
        self.lost: list[PipelineError] = []
        pipe, self.other = piped()
        self.workers = StageWorkers([RemoteWorker("worker 1 of stage 2", pipe, self.lost.append, PipelineSettings())])
        self.workers.worker = self
        self.free = 7

    def run_batch(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT if scheduled.total_num_scheduled_tokens == 0 else received("a", 5)

    def determine_available_memory(self) -> int:
        return self.free

    def call(self, answer: object, method: str, *args: object) -> Any:
        """What the stage returns, if the remote answers that."""
        with ThreadPoolExecutor(1) as threads:
            called = threads.submit(self.workers.call, method, args, {})
            call = CODEC.decode(self.other.receive())
            assert call.method == method
            self.other.send(CODEC.encode(answer if isinstance(answer, CallFailed) else CallResult(call.number, answer)))
            return called.result(20)


def received(request: str, token: int) -> ModelRunnerOutput:
    said = KVConnectorOutput(finished_recving={request})
    return ModelRunnerOutput(["a"], {"a": 0}, [[token]], kv_connector_output=said)


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    yield made
    made.other.close()


def test_what_all_workers_of_a_stage_have_received_is_received(box: Box) -> None:
    batch = SchedulerOutput.make_empty()
    batch.total_num_scheduled_tokens = 1
    first = box.call(received("b", 9), "run_batch", batch)
    assert first.sampled_token_ids == [[5]]  # the first worker's; all have sampled the same
    assert first.kv_connector_output.finished_recving is None
    assert first.kv_connector_output.expected_finished_count == 0  # the head counts stages, not workers
    second = box.call(received("a", 9), "run_batch", SchedulerOutput.make_empty())
    assert second.kv_connector_output.finished_recving == {"a"}
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None


@pytest.mark.parametrize(("mine", "theirs"), [(7, 5), (5, 7)])
def test_a_stage_has_the_memory_of_its_poorest_worker(box: Box, mine: int, theirs: int) -> None:
    box.free = mine
    assert box.call(theirs, "determine_available_memory") == 5


def test_a_worker_that_fails_is_named(box: Box) -> None:
    with pytest.raises(StageLost, match="worker 1 of stage 2 is lost: out of memory"):
        box.call(CallFailed("out of memory"), "determine_available_memory")
    assert len(box.lost) == 1


@pytest.mark.parametrize("method", ["apply_model", "__class__", print])
def test_what_stages_are_not_asked(setting: Setting, method: object) -> None:
    with pytest.raises(PipelineError, match="nothing that the stages"):
        setting.head.collective_rpc(method)


def test_a_stage_that_fails_says_why(setting: Setting) -> None:
    step = setting.step()
    setting.say(CallFailed("no memory left"))
    with pytest.raises(StageLost, match="stage 1 is lost: no memory left"):
        step.result()
    assert [str(error) for error in setting.lost] == ["stage 1 is lost: no memory left"]
    with pytest.raises(StageLost, match="no memory left"):
        setting.step()


def test_a_stage_that_is_gone_fails_what_waits_for_it_once(setting: Setting) -> None:
    steps = [setting.step(), setting.step()]
    setting.other.close("its box is taken back")
    for step in steps:
        with pytest.raises(StageLost, match="its box is taken back"):
            step.result()
    assert len(setting.lost) == 1


@pytest.mark.parametrize("message", [CallResult(99, None), Activations(False, {}), 5])
def test_an_answer_to_nothing_ends_the_pipe(setting: Setting, message: object) -> None:
    step = setting.step()
    setting.say(message)
    with pytest.raises(StageLost, match="answers nothing"):
        step.result()


def test_a_stage_that_is_alive_but_silent_is_given_up(setting: Setting) -> None:
    step = setting.step()
    with pytest.raises(StageLost, match="alive, but has not answered"):
        step.result(timeout=0.01)
    assert len(setting.lost) == 1


def test_activations_arrive_in_order_and_their_loss_is_told() -> None:
    one, two = piped()
    lost: list[PipelineError] = []
    out, into = (
        ActivationsOutput(one, 1, lost.append, PipelineSettings()),
        PipeInput(two, "stage 0", lost.append, PipelineSettings()),
    )
    for n in range(5):
        out.put(partial(Activations, n % 2 == 0, {}), at_once=n != 2)  # the third by a thread, those behind it after it
    assert [into.get().merged for _ in range(5)] == [True, False] * 2 + [True]
    two.close("the stage ends")
    for _ in range(2):
        with pytest.raises(StageLost, match="stage 0 is lost: the stage ends"):
            into.get()
    one.close()


class Heard:
    """A reader, the far end of its pipe, and who has handed on what."""

    def __init__(self, settings: PipelineSettings = PIPELINE_DEFAULTS) -> None:
        self.messages: list[object] = []
        self.threads: list[threading.Thread] = []
        self.ends: list[str] = []
        self.ended = threading.Event()
        self.warm_ups = 0
        pipe, self.other = piped()
        self.reader = PipeReader(pipe, "a reader", self._on_message, self._on_end, settings)

    def say(self, message: object) -> None:
        self.other.send(CODEC.encode(message))

    def say_all(self, messages: Iterable[object]) -> None:
        for message in messages:
            self.say(message)

    def wait_for(self, count: int) -> None:
        assert self.reader.read_until(lambda: len(self.messages) >= count, 30, self._warm_up)

    def _warm_up(self) -> None:
        self.warm_ups += 1

    def _on_message(self, message: object) -> None:
        self.threads.append(threading.current_thread())
        self.messages.append(message)

    def _on_end(self, reason: str) -> None:
        self.ends.append(reason)
        self.ended.set()


def test_who_waits_for_a_message_reads_it() -> None:
    heard = Heard(PipelineSettings(rest_s=60.0))
    heard.say(1)
    heard.wait_for(1)
    assert heard.threads == [threading.current_thread()]
    assert not heard.reader.read_until(lambda: False, 0.01)
    heard.other.close("the stage ends")
    assert heard.reader.read_until(heard.ended.is_set, 20)
    assert heard.ends == ["the other side gave up: the stage ends"]


def test_what_nobody_waits_for_is_heard_all_the_same() -> None:
    heard = Heard()
    heard.say(1)
    heard.other.close("the stage ends")
    assert heard.ended.wait(20)
    assert heard.messages == [1]
    assert heard.ends == ["the other side gave up: the stage ends"]
    assert heard.reader.read_until(heard.ended.is_set)
    assert not heard.reader.read_until(lambda: False)


def test_all_who_read_take_turns() -> None:
    heard = Heard(PipelineSettings(rest_s=0.0))  # its own thread wants to read as much as those who wait
    count = 1500
    began = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(heard.wait_for, wanted) for wanted in (count // 2, count)]
        waiting.append(threads.submit(heard.say_all, range(count)))
        for number in range(count):
            heard.wait_for(number)
        for each in waiting:
            each.result(40)
    assert heard.messages == [*range(count)]
    assert time.monotonic() - began < 20, "somebody has waited for what was there"
    heard.other.close()
    assert heard.reader.read_until(heard.ended.is_set, 20)
    assert len(heard.ends) == 1


def heard_after(settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch, *, pause_s: float = 0.0) -> Heard:
    """A reader whose first message has come at once, and the second at its third look, or after a pause. Each look is
    noted as a warm-up."""
    heard = Heard(settings)
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) == 3:
            heard.say(2)

    monkeypatch.setattr(os, "sched_yield", look)
    heard.say(1)
    heard.wait_for(1)
    assert not looks  # it was there
    if pause_s:
        threading.Timer(pause_s, heard.say, (2,)).start()
    heard.wait_for(2)
    assert heard.messages == [1, 2]
    assert heard.warm_ups == len(looks)
    heard.other.close()
    assert heard.ended.wait(20)
    return heard


def test_after_a_short_wait_who_waits_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = PipelineSettings(look_s=20.0, look_on_one_core=True, rest_s=60.0, message_warm_up_s=0.0)
    assert heard_after(looks, monkeypatch).warm_ups == 3


def test_who_may_not_look_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard_after(PipelineSettings(look_s=0.0, rest_s=60.0), monkeypatch, pause_s=0.02).warm_ups == 0


def test_pipes_that_cannot_be_opened_name_the_stage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    end = PipeEnd(stage=2, kind="data", ticket=issue_link(60, secrets.token_bytes), dial=DialPath("127.0.0.1", port))
    with pytest.raises(StageLost, match=f"no data pipe to stage 2: 127.0.0.1:{port}"):
        open_pipes([end], PipeConnections([end]), PipelineSettings(connect_s=0.01))
    ends = [PipeEnd(stage=0, kind="control", ticket=end.ticket)]
    with pytest.raises(StageLost, match="no control pipe to stage 0: it has not come"):
        open_pipes(ends, PipeConnections(ends), PipelineSettings(connect_s=0.01))


def test_connections_of_others_are_left_to_them() -> None:
    end = PipeEnd(stage=0, kind="control", ticket=issue_link(60, secrets.token_bytes))
    arrivals = PipeConnections([end])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not arrivals.put(LinkHello(b"x" * 16, bytes(16), LinkRole.SENDER).pack(), ours)
        assert not arrivals.put(b"no hello", ours)
        assert arrivals.put(LinkHello(end.ticket.link, bytes(16), LinkRole.SENDER).pack(), ours)
        taken = arrivals.take(end.ticket.link, until=0)
        assert taken is not None
        assert taken[1] is ours
        assert arrivals.take(end.ticket.link, until=0) is None


def place(**changes: Any) -> EngineConfig:
    ticket = issue_link(60, secrets.token_bytes)
    ends = (PipeEnd(stage=0, kind="control", ticket=ticket), PipeEnd(stage=0, kind="data", ticket=ticket))
    return EngineConfig(model="m", **{"partition": (1, 1), "stage": 1, "pipes": ends, **changes})


def test_places_that_cannot_be_taken_are_refused() -> None:
    check_pipeline(place())
    for changes, text in (
        ({"stage": 2}, "no such stage"),
        ({"pipes": ()}, "needs these pipes: control 0, data 0"),
        ({"stage": 0}, "needs these pipes: control 1, data 1"),
        ({"partition": (1, 1, 1)}, "needs these pipes: control 0, data 0, data 2"),
    ):
        with pytest.raises(PipelineError, match=text):
            check_pipeline(place(**changes))
