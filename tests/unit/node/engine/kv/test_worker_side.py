"""The connector beside a model: what the thread that runs it announces and writes, and that it never waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from p2pserve.kvtransport.routing.layerwise import SendDecision, SendMode
from p2pserve.node.engine.kv import worker_side
from p2pserve.node.engine.kv.step_work import LoadWork, SendWork, StepWork
from p2pserve.node.engine.kv.worker_side import WorkerSide
from p2pserve.node.engine.protocol import WorkerRank
from p2pserve.node.engine.transfers.incoming import LayerKv
from p2pserve.node.engine.transfers.outgoing import Prefilled
from p2pserve.node.engine.transfers.pacing import Pacing
from p2pserve.node.engine.vllm.device import CpuDevice, DeviceKind, Mark
from p2pserve.node.engine.vllm.layout import CacheForm, Shard

from .sides import BLOCK, BLOCKS, HEAD_DIM, HEADS, LAYERS, SETTINGS, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Writer:
    """An attention backend's writer, for the logical view."""

    def __init__(self) -> None:
        self.written = 0

    def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: Any, slots: torch.Tensor) -> None:
        self.written += 1
        cache[slots // BLOCK, :, slots % BLOCK] = torch.cat((k, v), -1)


@dataclass
class Sender:
    """In place of `Outgoing`: what the model's thread has told it."""

    pacing: Pacing
    said: list[tuple[str, Any]] = field(default_factory=list)
    announced: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(LAYERS), 0))

    def announce_layers(self, layers: range, computed: Prefilled) -> int:
        fresh = [layer for layer in layers if self.announced[layer] < computed.last]
        self.announced.update(dict.fromkeys(fresh, computed.last))
        if fresh:
            self.said.append(("layers", (fresh, computed.last)))
        return len(fresh)

    def prefill_done(self, tokens: int, mark: Mark) -> None:
        self.said.append(("done", tokens))

    def withdraw(self) -> None:
        self.announced = dict.fromkeys(range(LAYERS), 0)
        self.said.append(("withdraw", None))


class Receiver:
    """In place of `Incoming`, with so many pieces in its inbox."""

    def __init__(self, transfer: bytes, pieces: list[LayerKv], end: str | None = "") -> None:
        self.transfer, self.pieces, self.end = transfer, pieces, end
        self.was_applied = False

    def outcome(self, now: float) -> str | None:
        return self.end

    def take(self) -> LayerKv | None:
        return self.pieces.pop(0) if self.pieces else None

    @property
    def waiting_pieces(self) -> int:
        return len(self.pieces)

    def progress(self) -> tuple[float, int]:
        return 0.5, 20

    def confirm_applied(self) -> None:
        self.was_applied = True


class Hub:
    """In place of `TransferHub`, and of the line to the agent."""

    def __init__(self) -> None:
        self.senders: dict[bytes, list[Sender]] = {}
        self.receivers: dict[bytes, Receiver] = {}
        self.learned: list[tuple[int, float]] = []
        self.held: list[tuple[str, int, int]] = []
        self.pacer = self
        self.news = 0
        self.started: list[bytes] = []

    @property
    def hub(self) -> Hub:
        return self

    def tell_news(self) -> None:
        self.news += 1

    def on_prefill(self, pacings: list[Pacing], tokens: int, seconds: float) -> None:
        self.learned.append((tokens, seconds))

    def on_hold_up(self, codec: str, tokens: int, layers: int, seconds: float) -> None:
        self.held.append((codec, tokens, layers))

    def outgoing(self, transfer: bytes) -> list[Sender]:
        return self.senders.get(transfer, [])

    def incoming(self, transfer: bytes) -> Receiver | None:
        return self.receivers.get(transfer)

    def start(self, incoming: Receiver, first: int, find_slots: Any) -> None:
        self.started.append(incoming.transfer)

    def close_incoming(self, transfer: bytes) -> None:
        self.receivers.pop(transfer, None)


def pacing(mode: SendMode, group: int = 1) -> Pacing:
    return Pacing(SendDecision(mode, group, 0.0, 0.0, ""), None, "raw")  # type: ignore[arg-type]


@dataclass
class Worker:
    side: WorkerSide
    hub: Hub
    clock: Clock
    writers: list[Writer]
    caches: dict[str, torch.Tensor]


@pytest.fixture
def worker(clock: Clock) -> Worker:
    return make_worker(clock)


def make_worker(clock: Clock, *, codec: str = "raw", kind: DeviceKind = "cpu") -> Worker:
    hub, writers = Hub(), [Writer() for _ in range(LAYERS)]
    form = CacheForm(block_size=BLOCK, dtype=torch.float32)
    side = WorkerSide(
        WorkerRank(),
        range(HEADS),
        form,
        lambda shard, device, read: hub,  # type: ignore[arg-type,return-value]
        codec=codec,
        clock=clock,
        make_device=lambda _: device,
    )
    device = CpuDevice(clock)
    device.kind = kind
    names = [f"model.layers.{number}.self_attn" for number in range(LAYERS)]
    caches = {name: torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM) for name in names}
    layers = {name: SimpleNamespace(impl=writer) for name, writer in zip(names, writers, strict=True)}
    side.register(layers, caches)
    for writer in writers:
        writer.written = 0
    return Worker(side, hub, clock, writers, caches)


def send_work(last: int, *, final: bool = False) -> StepWork:
    return StepWork(sends=[SendWork("r", b"t" * 16, [3, 4, 5], 16, last, final=final)], computing=True)


def forward(worker: Worker, work: StepWork, *, hooks: bool = True, seconds: float = 0.0) -> None:
    """A step of the model."""
    worker.side.withdraw(work)
    worker.side.announce_rest()
    worker.side.begin(work)
    worker.clock.now += seconds
    for name in worker.caches if hooks else ():
        worker.side.save_layer(work, name)
    worker.side.load(work)
    worker.side.end(work)


def test_layers_are_announced_as_they_are_computed_and_a_prompt_when_it_is_complete(worker: Worker) -> None:
    (sender,) = worker.hub.senders[b"t" * 16] = [Sender(pacing(SendMode.LAYERWISE, 2))]
    forward(worker, send_work(16))
    assert sender.said == [("layers", ([0, 1], 16)), ("layers", ([2, 3], 16))]
    del sender.said[:]
    forward(worker, send_work(32, final=True))
    assert sender.said == [("layers", ([0, 1], 32)), ("layers", ([2, 3], 32)), ("done", 32)]
    assert worker.hub.held == [("raw", 16, 2)] * 4  # how long that keeps the model decides how the next ones leave


def test_what_no_hook_has_announced_is_announced_at_the_end_of_the_step(worker: Worker) -> None:
    """A step that runs as one graph has no hooks; one whose last group of layers is not full has too few."""
    (sender,) = worker.hub.senders[b"t" * 16] = [Sender(pacing(SendMode.LAYERWISE))]
    forward(worker, send_work(17, final=True), hooks=False)
    assert sender.said == [("layers", ([0, 1, 2, 3], 17)), ("done", 17)]


def test_what_leaves_all_at_once_waits_for_the_next_step_and_not_for_another_prompt(worker: Worker) -> None:
    (sender,) = worker.hub.senders[b"t" * 16] = [Sender(pacing(SendMode.SERIALISED))]
    forward(worker, send_work(16))
    forward(worker, send_work(32, final=True))
    assert sender.said == []  # the token of this step has not left
    forward(worker, StepWork())
    assert sender.said == [("layers", ([0, 1, 2, 3], 32)), ("done", 32)]


@pytest.mark.parametrize("mode", list(SendMode))
def test_a_prompt_that_lost_its_blocks_is_not_announced_from_them(worker: Worker, mode: SendMode) -> None:
    (sender,) = worker.hub.senders[b"t" * 16] = [Sender(pacing(mode))]
    forward(worker, send_work(32, final=True))
    del sender.said[:]
    forward(worker, StepWork(withdrawn=[b"t" * 16]))
    assert sender.said == [("withdraw", None)]


def test_blocks_are_let_go_once_the_request_is_over_and_its_transfer_has_ended(worker: Worker) -> None:
    worker.hub.senders[b"t" * 16] = [Sender(pacing(SendMode.LAYERWISE)), Sender(pacing(SendMode.SERIALISED))]
    forward(worker, send_work(32, final=True))
    assert worker.side.take_sent(set()) == set()
    assert worker.side.take_sent({"r", "never sent"}) == set()
    worker.hub.senders[b"t" * 16].pop()
    assert worker.side.take_sent(set()) == set()
    del worker.hub.senders[b"t" * 16]
    assert worker.side.take_sent(set()) == {"r"}
    assert worker.side.take_sent({"r"}) == set()


def test_a_transfer_that_ended_before_its_request_frees_it_when_that_ends(worker: Worker) -> None:
    forward(worker, send_work(16))  # it could not be opened
    assert worker.side.take_sent(set()) == set()  # its blocks are still the model's
    assert worker.side.take_sent({"r"}) == {"r"}


@dataclass
class LateMark:
    """A mark of a device that is behind."""

    at: float
    reached: bool = False

    def wait(self) -> None:
        raise AssertionError("the model's thread waits")

    def seconds_since(self, earlier: LateMark) -> float:
        return self.at - earlier.at


def test_a_step_is_learned_from_when_the_device_is_done_with_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model's thread takes is a launch."""
    worker.hub.senders[b"t" * 16] = [Sender(pacing(SendMode.LAYERWISE))]
    marks = [LateMark(each) for each in (5.0, 5.5, 5.6, 5.7, 5.8, 7.0)]
    made = iter(marks)
    monkeypatch.setattr(CpuDevice, "mark", lambda device: next(made))
    forward(worker, send_work(16))
    forward(worker, StepWork())
    assert worker.hub.learned == []
    for mark in marks:
        mark.reached = True
    forward(worker, StepWork())
    assert worker.hub.learned == [(16, 2.0)]


def piece(layer: int, *, heads: range = range(HEADS), value: float = 1.0) -> LayerKv:
    k = torch.full((20, len(heads), HEAD_DIM), value)
    slots = torch.arange(3 * BLOCK, 3 * BLOCK + 20)
    return LayerKv(layer, heads.start, 0, k, -k, slots)


def load_work(request: str, transfer: bytes) -> LoadWork:
    return LoadWork(request, transfer, [3, 4], 0, 20, all_or_nothing=False)


def slow_writes(worker: Worker, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writer.do_kv_cache_update

    def late(self: Writer, *arguments: Any) -> None:
        write(self, *arguments)
        worker.clock.now += seconds

    monkeypatch.setattr(Writer, "do_kv_cache_update", late)


@pytest.mark.parametrize("computing", [False, True])
def test_a_step_writes_for_a_short_while_and_the_rest_is_for_the_next(
    worker: Worker, computing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_writes(worker, 0.0004, monkeypatch)
    receiver = worker.hub.receivers[b"t" * 16] = Receiver(b"t" * 16, [piece(n % LAYERS) for n in range(100)])
    forward(worker, StepWork(loads=[load_work("r", b"t" * 16)], computing=computing))
    written = sum(writer.written for writer in worker.writers)
    bound = (SETTINGS.write_s if computing else SETTINGS.idle_write_s) / 0.0004
    assert bound <= written <= bound + 1
    assert worker.hub.news == 1  # the engine is not to sleep on it
    applied = [receiver.was_applied]
    assert worker.side.take_loaded() == (set(), set())
    while receiver.pieces:
        forward(worker, StepWork(computing=computing))
    assert [*applied, receiver.was_applied] == [False, True]
    assert worker.side.take_loaded() == ({"r"}, set())


def test_every_load_gets_on_in_every_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_writes(worker, 1.0, monkeypatch)
    names = [bytes([number]) * 16 for number in range(5)]
    for name in names:
        worker.hub.receivers[name] = Receiver(name, [piece(0), piece(1)])
    forward(worker, StepWork(loads=[load_work(name.hex(), name) for name in names], computing=True))
    assert [len(worker.hub.receivers[name].pieces) for name in names] == [1] * 5
    forward(worker, StepWork(computing=True))
    assert worker.side.take_loaded()[0] == {name.hex() for name in names}


def test_what_has_arrived_of_a_load_that_failed_is_written_before_its_prefix_is_kept(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_writes(worker, 1.0, monkeypatch)
    worker.hub.receivers[b"t" * 16] = Receiver(b"t" * 16, [piece(0), piece(1)], end="the link broke")
    forward(worker, StepWork(loads=[load_work("r", b"t" * 16)], computing=True))
    assert worker.side.take_loaded() == (set(), set())
    forward(worker, StepWork(computing=True))
    assert worker.side.take_loaded() == ({"r"}, set())
    assert worker.side.take_invalid() == {4}  # 20 positions are there: one block of two


def test_heads_from_several_senders_meet_in_the_cache(worker: Worker) -> None:
    halves = [piece(2, heads=range(1), value=1.0), piece(2, heads=range(1, 2), value=2.0)]
    worker.hub.receivers[b"t" * 16] = Receiver(b"t" * 16, halves)
    forward(worker, StepWork(loads=[load_work("r", b"t" * 16)]))
    k, v = worker.side.read_kv(2, [3, 4], 0, 20)
    assert torch.equal(k, torch.tensor([1.0, 2.0])[None, :, None].expand(20, HEADS, HEAD_DIM))
    assert torch.equal(v, -k)


@pytest.mark.parametrize("codec", ["raw", "kv4", "fp8", "kivi4"])
def test_a_gpu_compiles_the_codec_that_its_engine_is_started_with(
    codec: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton.errors")
    compiled: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        worker_side, "warm_up", lambda name, *, heads, head_dim, **_: compiled.append((name, heads, head_dim))
    )
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)  # it is the whole process's
    make_worker(clock, codec=codec, kind="cuda")
    assert compiled == [(codec, HEADS, HEAD_DIM)]


def test_a_cpu_compiles_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "warm_up", lambda *_, **__: pytest.fail("there is nothing to compile"))
    make_worker(clock, codec="kv4")


@pytest.mark.parametrize("codec", ["kv4", "fp8"])
def test_an_engine_starts_although_its_codec_cannot_be_compiled_for_its_gpu(
    codec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = pytest.importorskip("triton.errors")

    def fail(*arguments: Any, **settings: Any) -> None:
        raise errors.TritonError("out of resource: shared memory")

    monkeypatch.setattr(worker_side, "warm_up", fail)
    shard = Shard(layers=range(1), heads=range(1), head_dim=288, dtype=torch.bfloat16)
    worker_side.warm_up_codec(codec, CpuDevice(), shard)
    assert f"{codec} does not work on this GPU for heads of 288: out of resource" in caplog.text


class NothingWaits(TorchDispatchMode):
    """Fails on what makes a GPU's thread wait: values read back, results whose size only the device knows, and copies
    between main memory and the device. Tensors on `meta` stand for those on a GPU. Notes which operations ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.ran.append(name)
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        assert not any(part in name for part in ("_local_scalar_dense", "nonzero", "equal.", "masked_select", "unique"))
        result = func(*args, **(kwargs or {}))
        made = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        on = {tensor.device.type for tensor in (*tensors, *made)}
        assert len(on) < 2, f"{name} between {on}"
        return result


@contextmanager
def on_a_gpu(worker: Worker) -> Iterator[NothingWaits]:
    """The caches lie on a device from now on."""
    for cache in worker.caches.values():
        torch.utils.swap_tensors(cache, cache.to("meta"))
    with NothingWaits() as mode:
        yield mode


def test_saving_runs_nothing_on_the_models_thread(worker: Worker) -> None:
    for mode in SendMode:
        worker.hub.senders[b"t" * 16] = [Sender(pacing(mode))]
        with on_a_gpu(worker) as gpu:
            forward(worker, send_work(16))
            forward(worker, send_work(32, final=True))
            forward(worker, StepWork())
        assert gpu.ran == []


@pytest.mark.parametrize("heads", [range(HEADS), range(1, 2)])
def test_loading_never_waits_for_the_device(worker: Worker, heads: range) -> None:
    whole = piece(1, heads=heads)
    staged = LayerKv(1, heads.start, 0, whole.k.to("meta"), whole.v.to("meta"), whole.slots.to("meta"))
    receiver = worker.hub.receivers[b"t" * 16] = Receiver(b"t" * 16, [staged])
    with on_a_gpu(worker) as gpu:
        forward(worker, StepWork(loads=[load_work("r", b"t" * 16)], computing=True))
    assert receiver.was_applied
    assert worker.writers[1].written == 1
    assert any("index_put" in name for name in gpu.ran)


@pytest.mark.parametrize("wrong", ["slots on the host", "a value read back"])
def test_what_would_wait_is_seen(worker: Worker, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = piece(1)
    slots = whole.slots if wrong == "slots on the host" else whole.slots.to("meta")
    staged = LayerKv(1, 0, 0, whole.k.to("meta"), whole.v.to("meta"), slots)
    worker.hub.receivers[b"t" * 16] = Receiver(b"t" * 16, [staged])
    if wrong == "a value read back":
        monkeypatch.setattr(Writer, "do_kv_cache_update", lambda self, layer, k, *rest: k.sum().item())
    with pytest.raises((AssertionError, RuntimeError)), on_a_gpu(worker):
        forward(worker, StepWork(loads=[load_work("r", b"t" * 16)], computing=True))
