"""The emulated engine against a clock of its own: what it says, and when each step is to end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.costs.step_times import chunk_pairs
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node.engine import protocol
from p2pserve.node.engine.emulated.engine import EmulatedEngine, EmulationError, KvEnded, KvSent, model_capacity
from p2pserve.node.engine.emulated.tokens import EmulatedAnswer
from p2pserve.node.engine.emulated.transfers import ComputedSpan

SHAPE = ModelShape(
    name="small", layers=8, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=4096, vocabulary=1000
)
GPU = gpu_table().find("L4")
EMULATION = protocol.Emulation(model=SHAPE, gpu=GPU, gpu_link_gbps=100.0, vocabulary=900)
TIMES = replica_times(SHAPE, (StageHardware(GPU, 1, 8, 100.0),))
LINK = LinkTicket(link=b"l" * 16, secret=b"s" * 32, lease_s=600.0)
TICKET = TransferTicket(transfer=b"t" * 16, link=LINK.link, codec="kv4", deadline_s=30.0)
ALL = protocol.KvSlice(first_layer=0, last_layer=8, first_head=0, last_head=4)
OUTLET = protocol.Outlet(slice=ALL, ticket=TICKET, link=LINK, paths=(DialPath("192.0.2.1", 1),), gbps=1.0, rtt_s=0.01)
INLET = protocol.Inlet(slice=ALL, ticket=TICKET, link=LINK)


@dataclass
class FakeArrivals:
    """Prompt KV that comes when the test says so."""

    transfer: bytes
    on_end: Callable[[], None]
    deadline: float = 1000.0
    started: bool = False
    part: float = 0.0
    tokens: int = 0
    aborted: str = ""

    def start(self) -> None:
        self.started = True

    def progress(self) -> tuple[float, int]:
        return self.part, self.tokens

    def abort(self, reason: str) -> None:
        if not self.aborted:
            self.aborted = reason
            self.on_end()


@dataclass
class FakeTransfers:
    """Notes what the engine wants of its transfers."""

    refuse: bool = False
    sends: dict[bytes, Callable[[], None]] = field(default_factory=dict)
    withdrawn: list[bytes] = field(default_factory=list)
    spans: list[ComputedSpan] = field(default_factory=list)
    arrivals: list[FakeArrivals] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    orders: list[protocol.EngineMessage] = field(default_factory=list)

    def send(self, outlets: Sequence[protocol.Outlet], on_end: Callable[[], None]) -> None:
        self.sends[outlets[0].ticket.transfer] = on_end

    def send_span(self, transfer: bytes, span: ComputedSpan) -> None:
        assert transfer in self.sends
        self.spans.append(span)

    def withdraw(self, transfer: bytes) -> None:
        self.withdrawn.append(transfer)

    def expect(self, inlets: Sequence[protocol.Inlet], tokens: int, on_end: Callable[[], None]) -> FakeArrivals:
        if self.refuse:
            raise TransferError("the link is over")
        self.arrivals.append(FakeArrivals(inlets[0].ticket.transfer, on_end))
        return self.arrivals[-1]

    def close_incoming(self, transfer: bytes) -> None:
        self.forgotten.append(transfer)

    def abort(self, transfer: bytes, reason: str) -> None:
        self.aborted.append(reason)

    def carry_out(self, order: protocol.SetLinkPaths | protocol.CloseLink | protocol.AbortTransfer) -> None:
        self.orders.append(order)


class Bench:
    """An engine, its clock, and what it has said."""

    def __init__(self, emulation: protocol.Emulation = EMULATION, **settings: object) -> None:
        self.now = 100.0
        self.transfers = FakeTransfers()
        self.said: list[protocol.EngineMessage] = []
        self.woken: list[KvEnded | KvSent] = []
        config = msgspec.structs.replace(protocol.EngineConfig(model="small", backend="emulated"), **settings)
        self.engine = EmulatedEngine(config, emulation, self.transfers, tell=self.said.append, wake=self.woken.append)

    def submit(self, request: str, length: int, count: int, **settings: object) -> tuple[int, ...]:
        """Take in a request, of its own prompt; returns that."""
        first = sum(map(ord, request))
        tokens = tuple(1 + (first + i * 7) % 800 for i in range(length))
        sampling = protocol.Sampling(max_tokens=count)
        submit = protocol.Submit(request=request, prompt=tokens, sampling=sampling, deadline_s=60.0)
        self.engine.handle(msgspec.structs.replace(submit, **settings), self.now)
        return tokens

    def step(self, late_s: float = 0.0) -> float | None:
        """One step of the loop; returns how long the step was to take, or None."""
        for word in self.woken:
            self.engine.handle(word, self.now)
        self.woken.clear()
        ends = self.engine.begin_step(self.now)
        seconds = None
        if ends is not None:
            seconds = ends - self.now
            self.now = ends + late_s
            self.engine.end_step(self.now)
        self.engine.check_deadlines(self.now)
        return seconds

    def outputs(self) -> list[protocol.NewTokens]:
        """What was told of requests since the last call."""
        told = [output for word in self.said if isinstance(word, protocol.Step) for output in word.outputs]
        self.said.clear()
        return told


def test_a_card_that_throttles_takes_longer_from_then_on_and_its_steps_say_so() -> None:
    plain, throttling = Bench(), protocol.Throttling(after_s=0.05, factor=1.5)
    slow = Bench(msgspec.structs.replace(EMULATION, throttling=throttling))
    for bench in (plain, slow):
        bench.submit("r", 16, 40)
    before = after = 0
    while (expected := plain.step()) is not None:
        factor = 1.0 if slow.now < 100.05 else 1.5
        assert slow.step() == pytest.approx(factor * expected)
        before, after = before + (factor == 1.0), after + (factor == 1.5)
    assert min(before, after) > 3
    steps = [word.iterations for word in slow.said if isinstance(word, protocol.Step) and word.iterations is not None]
    assert max(each.longest_s for each in steps) > 1.2 * min(each.seconds / each.steps for each in steps[1:])


def test_an_answer_takes_as_long_as_the_model_says_and_ends_with_its_length() -> None:
    bench = Bench()
    prompt = bench.submit("r", 700, 4)
    answer = EmulatedAnswer(prompt, 900)
    assert bench.step() == pytest.approx(TIMES.prefill_s(512, chunk_pairs(0, 512)))
    assert bench.outputs() == []
    assert bench.step() == pytest.approx(TIMES.prefill_s(188, chunk_pairs(512, 188)))
    assert [output.tokens for output in bench.outputs()] == [(answer.next(),)]
    for held in (700, 701, 702):
        assert bench.step() == pytest.approx(TIMES.decode_line(1).step_s(held))
    told = bench.outputs()
    assert [output.tokens for output in told] == [(answer.next(),) for _ in range(3)]
    assert [output.finish for output in told] == [None, None, "length"]
    assert bench.engine.idle
    assert bench.step() is None


def test_the_time_of_this_process_is_not_added_to_the_model() -> None:
    bench = Bench()
    bench.submit("r", 10, 50)
    began = bench.now
    expected = TIMES.prefill_s(10, chunk_pairs(0, 10)) + sum(TIMES.decode_line(1).step_s(10 + n) for n in range(19))
    for _ in range(20):
        bench.step(late_s=0.001)
    assert bench.now - began == pytest.approx(expected + 0.001)


def test_what_is_far_behind_is_not_caught_up(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.submit("r", 10, 50)
    bench.step(late_s=2.0)
    assert bench.step() == pytest.approx(TIMES.decode_line(1).step_s(10))
    assert "too slow" in caplog.text
    caplog.clear()
    bench.engine.handle(protocol.Cancel(request="r"), bench.now)
    bench.now += 5.0  # a pause is no delay
    bench.submit("s", 10, 2)
    bench.step()
    assert caplog.text == ""


def test_a_prompt_for_another_engine_is_told_of_chunk_by_chunk() -> None:
    bench = Bench()
    bench.submit("r", 600, 1, send=(OUTLET,))
    began = bench.now
    first, second = bench.step(), bench.step()
    assert first is not None
    assert second is not None
    spans = bench.transfers.spans
    assert [(span.first, span.last, span.final) for span in spans] == [(0, 512, False), (512, 600, True)]
    assert spans[0].began == began
    assert spans[0].ends == spans[1].began == pytest.approx(began + first)
    assert spans[1].ends == pytest.approx(bench.now)
    assert bench.outputs()[-1].finish == "length"
    assert bench.transfers.aborted == []


def test_a_cancelled_prompt_ends_its_transfer() -> None:
    bench = Bench()
    bench.submit("r", 600, 1, send=(OUTLET,))
    bench.step()
    bench.engine.handle(protocol.Cancel(request="r"), bench.now)
    assert bench.transfers.aborted == ["the request was cancelled"]
    assert bench.engine.idle


def outlet(number: int) -> protocol.Outlet:
    """To a transfer of its own."""
    ticket = msgspec.structs.replace(TICKET, transfer=bytes([number]) * 16)
    return msgspec.structs.replace(OUTLET, ticket=ticket)


def small_room() -> Bench:
    """Room for 768 positions."""
    bench = Bench(kv_cache_mib=12)
    assert bench.engine.ready(0.0).kv_tokens == 768
    return bench


def stats(bench: Bench) -> protocol.EngineStats:
    """As last told."""
    return [word for word in bench.said if isinstance(word, protocol.Step)][-1].stats


def test_kv_stays_until_its_transfer_has_ended_and_later_prompts_wait_for_the_room() -> None:
    bench = small_room()
    for number in range(4):
        bench.submit(f"r{number}", 400, 1, send=(outlet(1 + number),))
    assert bench.step() is not None
    assert bench.step() is None  # the second would need 400 of the 368 positions that are left
    told = stats(bench)
    assert (told.running, told.waiting, told.kv_free_tokens, told.pending_prefill_tokens) == (0, 3, 368, 1200)
    assert told.kv_usage == pytest.approx(400 / 768)
    for number in range(4):
        assert bench.step() is None
        bench.transfers.sends[bytes([1 + number]) * 16]()  # delivered, or not
        assert (bench.step() is None) is (number == 3)
    assert [output.finish for output in bench.outputs()] == ["length"] * 4
    assert bench.engine.idle
    assert bench.transfers.aborted == []


def test_the_agent_hears_that_room_is_free_although_nothing_is_computed() -> None:
    bench = small_room()
    bench.submit("r", 400, 1, send=(OUTLET,))
    bench.step()
    assert bench.engine.idle
    assert (stats(bench).running, stats(bench).kv_free_tokens) == (0, 368)
    bench.transfers.sends[TICKET.transfer]()
    bench.step()
    assert (stats(bench).kv_usage, stats(bench).kv_free_tokens) == (0.0, 768)


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_prompt_that_is_given_up_keeps_its_room_until_its_transfer_has_ended(how: str) -> None:
    bench = small_room()
    bench.submit("r", 600, 1, send=(OUTLET,), deadline_s=0.001 if how == "late" else 60.0)
    bench.step()
    bench.now += 0.1
    if how == "cancelled":
        bench.engine.handle(protocol.Cancel(request="r"), bench.now)
    bench.step()
    bench.step()
    assert len(bench.transfers.aborted) == 1
    assert bench.engine.idle
    assert stats(bench).kv_free_tokens == 768 - 512
    bench.transfers.sends[TICKET.transfer]()
    bench.step()
    assert stats(bench).kv_free_tokens == 768


def test_a_prompt_that_has_been_read_is_sent_although_its_request_is_cancelled() -> None:
    bench = small_room()
    bench.submit("r", 400, 5, send=(OUTLET,))
    bench.step()
    bench.engine.handle(protocol.Cancel(request="r"), bench.now)
    bench.step()
    assert bench.transfers.aborted == []
    assert stats(bench).kv_free_tokens == 368


def test_what_is_preempted_is_not_sent_before_it_is_computed_again() -> None:
    bench = small_room()
    bench.submit("old", 380, 20)
    bench.submit("young", 384, 9, send=(OUTLET,))
    while not bench.transfers.withdrawn:
        assert bench.step() is not None
    assert bench.transfers.withdrawn == [TICKET.transfer]
    read = list(bench.transfers.spans)
    assert read[-1].final
    while not bench.engine.idle:
        assert bench.step() is not None
    again = bench.transfers.spans[len(read) :]
    assert [(span.first, span.last, span.final) for span in again] == [(0, 384, True)]
    assert [output.finish for output in bench.outputs() if output.finish] == ["length"] * 2


def test_kv_from_elsewhere_leaves_one_position_to_compute() -> None:
    bench = Bench()
    prompt = bench.submit("r", 600, 2, receive=(INLET,), receive_tokens=600)
    assert bench.step() is None
    (arrivals,) = bench.transfers.arrivals
    assert arrivals.started
    arrivals.part, arrivals.tokens = 1.0, 600
    arrivals.on_end()
    assert bench.step() == pytest.approx(TIMES.decode_line(1).step_s(599))
    (told,) = bench.outputs()
    assert (told.tokens, told.cached_tokens) == ((EmulatedAnswer(prompt, 900).next(),), 600)
    assert bench.transfers.forgotten == [TICKET.transfer]


def awaits_first_token(bench: Bench) -> tuple[tuple[int, ...], FakeArrivals]:
    """A request that waits for KV of all of its prompt, and for its first token."""
    prompt = bench.submit("r", 600, 3, receive=(INLET,), receive_tokens=600, awaits_first_token=True)
    assert bench.step() is None
    (arrivals,) = bench.transfers.arrivals
    return prompt, arrivals


def arrive(arrivals: FakeArrivals, tokens: int) -> None:
    arrivals.part, arrivals.tokens = tokens / 600, tokens
    arrivals.on_end()


@pytest.mark.parametrize("first", ["token", "kv"])
def test_an_answer_goes_on_from_a_token_that_was_told(first: str) -> None:
    """Whichever comes first; the last position of the prompt is not computed again."""
    bench = Bench()
    prompt, arrivals = awaits_first_token(bench)
    told = protocol.SetFirstToken(request="r", token=77)
    if first == "token":
        bench.engine.handle(told, bench.now)
        assert bench.step() is None
        arrive(arrivals, 600)
    else:
        arrive(arrivals, 600)
        assert bench.step() is None
        bench.engine.handle(told, bench.now)
    assert bench.step() == pytest.approx(TIMES.decode_line(1).step_s(600))
    bench.step()
    answer = EmulatedAnswer((*prompt, 77), 900)
    outputs = bench.outputs()
    assert [output.tokens for output in outputs] == [(77, answer.next()), (answer.next(),)]
    assert outputs[-1].finish == "length"
    assert bench.engine.idle


@pytest.mark.parametrize("word", ["abort", "no token"])
def test_without_a_first_token_the_answer_begins_here(word: str) -> None:
    bench = Bench()
    prompt, arrivals = awaits_first_token(bench)
    arrive(arrivals, 600)
    assert bench.step() is None
    if word == "abort":
        bench.engine.handle(protocol.AbortTransfer(transfer=TICKET.transfer, reason="it was lost"), bench.now)
        assert bench.transfers.orders
    else:
        bench.engine.handle(protocol.SetFirstToken(request="r", token=900), bench.now)
    assert bench.step() == pytest.approx(TIMES.decode_line(1).step_s(599))
    assert bench.outputs()[0].tokens == (EmulatedAnswer(prompt, 900).next(),)


def test_what_is_missing_is_computed_without_waiting_for_a_first_token() -> None:
    bench = Bench(max_batched_tokens=1000)
    prompt, arrivals = awaits_first_token(bench)
    arrive(arrivals, 37)
    assert bench.step() == pytest.approx(TIMES.prefill_s(568, chunk_pairs(32, 568)))
    bench.engine.handle(protocol.SetFirstToken(request="r", token=77), bench.now)
    bench.step()
    answer = EmulatedAnswer(prompt, 900)
    assert [output.tokens for output in bench.outputs()] == [(answer.next(),), (answer.next(),)]


@pytest.mark.parametrize(("received", "kept"), [(0, 0), (37, 32), (599, 592)])
def test_what_is_missing_is_computed(received: int, kept: int) -> None:
    bench = Bench(max_batched_tokens=1000)
    bench.submit("r", 600, 2, receive=(INLET,), receive_tokens=600)
    bench.step()
    (arrivals,) = bench.transfers.arrivals
    arrivals.part, arrivals.tokens = received / 600, received
    arrivals.abort("the sender is gone")
    left = 600 - kept
    assert bench.step() == pytest.approx(TIMES.prefill_s(left, chunk_pairs(kept, left)))


def test_kv_that_does_not_come_is_given_up() -> None:
    bench = Bench()
    bench.submit("r", 600, 2, receive=(INLET,), receive_tokens=600, deadline_s=100.0)
    bench.step()
    bench.now += 29.0  # longer than computing it could ever take
    bench.step()
    assert bench.transfers.arrivals[0].aborted.startswith("no KV came")
    assert bench.step() is not None


def test_kv_is_slow_only_once_its_prompt_is_computed() -> None:
    bench = Bench()
    _, arrivals = awaits_first_token(bench)
    for part in (0.01, 0.02, 0.03, None, 0.03, 0.03):
        if part is None:
            assert not arrivals.aborted
            bench.engine.handle(protocol.SetFirstToken(request="r", token=77), bench.now)
        arrivals.part = part or arrivals.part
        bench.now += 2.5
        bench.step()
    assert arrivals.aborted.startswith("KV stopped coming")


def test_a_link_that_is_over_is_as_good_as_none() -> None:
    bench = Bench()
    bench.transfers.refuse = True
    bench.submit("r", 5, 1, receive=(INLET,), receive_tokens=5)
    assert bench.step() is not None
    assert bench.outputs()[-1].finish == "length"


def test_deadlines_refusals_and_orders() -> None:
    bench = Bench(max_model_len=100)
    for name, prompt, settings, word in (
        ("long", 100, {}, "longest"),
        ("empty", 0, {}, "empty"),
        ("foreign", 3, {"prompt": (1, 900)}, "vocabulary of 900"),
        ("few", 3, {"receive": (INLET,), "receive_tokens": 4}, "of a prompt of 3"),
    ):
        bench.submit(name, prompt, 5, **settings)
        (told,) = bench.outputs()
        assert (told.request, told.finish) == (name, "refused")
        assert word in told.reason
    bench.submit("late", 5, 90, deadline_s=0.001)
    bench.step()
    bench.now += 0.1
    bench.step()
    assert [told.finish for told in bench.outputs() if told.finish] == ["deadline"]
    order = protocol.CloseLink(link=LINK.link, reason="gone")
    bench.engine.handle(order, bench.now)
    assert bench.transfers.orders == [order]
    bench.submit("fits", 98, 50)
    while bench.step() is not None:
        pass
    assert [told.finish for told in bench.outputs()] == [None, "length"]  # room for two tokens only


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_load_returns_to_nothing_when_requests_are_cancelled(steps: int) -> None:
    """Also when it was last told together with another request's refusal."""
    bench = Bench(max_model_len=100)
    bench.submit("before", 5, 1)
    while bench.step() is not None:
        pass
    assert (stats(bench).running, stats(bench).waiting) == (0, 0)
    bench.submit("r", 20, 50)
    bench.submit("long", 100, 5)
    assert stats(bench).running + stats(bench).waiting == 1
    for _ in range(steps):
        bench.step()
    bench.engine.handle(protocol.Cancel(request="r"), bench.now)
    bench.step()
    assert (stats(bench).running, stats(bench).waiting, stats(bench).pending_prefill_tokens) == (0, 0, 0)
    assert stats(bench).kv_usage == 0.0


def test_the_agent_hears_of_steps_and_of_the_load() -> None:
    bench = Bench()
    bench.submit("a", 20, 30)
    bench.submit("b", 20, 40)
    while bench.step() is not None:
        pass
    steps = [word for word in bench.said if isinstance(word, protocol.Step)]
    told = [step.iterations for step in steps if step.iterations is not None]
    assert sum(each.steps for each in told) == 40
    assert sum(each.prefill_tokens for each in told) == 40
    assert sum(each.decode_tokens for each in told) == 29 + 39
    assert sum(each.seconds for each in told) == pytest.approx(bench.now - 100.0)
    assert (steps[0].stats.running, steps[-1].stats.running, steps[-1].stats.kv_usage) == (2, 0, 0.0)
    for word in bench.said:
        assert protocol.from_engine.decode(protocol.pack(word)) == word


def test_it_says_that_it_is_emulated_and_what_it_holds() -> None:
    ready = Bench(kv_cache_mib=64).engine.ready(0.1)
    assert ready.engine == "emulated 1x L4-24GB (roofline, dense)"
    assert ready.device == "cpu"
    assert ready.kv_tokens == (64 << 20) // SHAPE.kv_bytes_per_token // 16 * 16
    assert ready.max_model_len == ready.kv_tokens
    assert (ready.tflops, ready.memory_gbps, ready.vocabulary) == (GPU.tflops, GPU.memory_gbps, 900)
    big = msgspec.structs.replace(EMULATION, model=msgspec.structs.replace(SHAPE, layers=2000))
    with pytest.raises(EmulationError, match="no room for KV"):
        model_capacity(big, tp=1, kv_cache_mib=None)
