"""How fast the codecs are: `python -m p2pserve.kernels.bench`.

For each codec, number of CPU threads and direction: median GB/s of 16-bit input (K and V, all
checks, payload in its own memory), beside a copy of the same tensors measured in turns. `path` says
whether C++ or the reference ran. On a GPU: `encode_into` and `decode_into` beside a device copy,
timed by CUDA events."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from .. import accelerate
from ..codec import decode, decode_into, encode, encode_into
from ..codecs import CODECS, codec_named
from ..errors import CodecError
from ..format import Codec
from ..raw import RAW
from ..soundness import Soundness

HEADS, HEAD_DIM = 8, 128
DEFAULT_TOKENS = 512
GPU_TOKENS = (256, 1024, 4096)
"""Windows of 1, 4 and 16 MiB of KV, as an engine reads them out of its cache."""
GPU_TARGET = 0.70
"""Of the rate of a device copy, that codecs on a GPU should reach."""
QUEUED = 24
"""Blocks in a row on a GPU; all their launches fit into its queue."""
HOLD_BYTES, HOLD_COPIES = 2**28, 64
"""Copies that keep a GPU busy, 8 ms of an H200, while the blocks behind them are queued."""
START = 512  # past the exempt tokens, at a multiple of every codec's groups: one block out of a longer prompt


@dataclass(frozen=True, slots=True)
class CodecRate:
    """One measurement. Rates in 1e9 bytes per second of 16-bit K and V."""

    op: str
    codec: str
    device: str
    threads: int
    path: str
    tokens: int
    gbps_16bit: float
    memcpy_gbps: float
    of_memcpy: float

    @classmethod
    def of(
        cls, what: tuple[str, Codec, str], threads: int, path: str, tokens: int, seconds: float, copy_seconds: float
    ) -> CodecRate:
        """`what`: operation, codec, device. Seconds of one block, and of a copy of its values."""
        op, codec, device = what
        nbytes = 4 * tokens * HEADS * HEAD_DIM
        rate, copy_rate = (round(nbytes / spent / 1e9, 3) for spent in (seconds, copy_seconds))
        return cls(op, codec.name, device, threads, path, tokens, rate, copy_rate, round(copy_seconds / seconds, 3))


def measure(codec: Codec, threads: int, tokens: int, repeats: int) -> list[CodecRate]:
    """Quantise and dequantise one block of `tokens` x 8 x 128 values again and again, on the CPU."""
    k, v = _block(tokens, torch.device("cpu"))
    copy = _copying(k, v)
    payload = encode(codec, k, v, start=START, layer=0)
    stored = torch.frombuffer(payload, dtype=torch.uint8)

    def quantise() -> None:
        encode(codec, k, v, start=START, layer=0)

    def dequantise() -> None:
        shape = {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM}
        decode(codec, stored, **shape, dtype=torch.bfloat16, start=START, layer=0)

    return [
        CodecRate.of((op, codec, "cpu"), threads, _path(codec), tokens, *_in_turns(action, copy, repeats, _clocked))
        for op, action in (("quantise", quantise), ("dequantise", dequantise))
    ]


def measure_on_gpu(codec: Codec, device: torch.device, tokens: int, repeats: int) -> list[CodecRate]:
    """As `measure`, for blocks that stay on the GPU."""
    k, v = _block(tokens, device)
    copy = _copying(k, v)
    into = torch.empty_like(k), torch.empty_like(v)
    payload = torch.frombuffer(encode(codec, k, v, start=START, layer=0), dtype=torch.uint8).to(device)
    found: list[Soundness] = []
    busy = torch.zeros(2, HOLD_BYTES, dtype=torch.uint8, device=device)

    def hold() -> None:
        for _ in range(HOLD_COPIES):
            busy[0].copy_(busy[1])

    def quantise() -> None:
        found.append(encode_into(codec, k, v, payload, start=START, layer=0))

    def dequantise() -> None:
        found.append(decode_into(codec, payload, *into, start=START, layer=0))

    def queued_seconds(run: Callable[[], None]) -> float:
        seconds = _queued(run, hold)
        while found:
            found.pop().raise_if_unsound()
        return seconds

    path, threads = "copy" if codec is RAW else "triton", torch.get_num_threads()
    return [
        CodecRate.of((op, codec, device.type), threads, path, tokens, *_in_turns(action, copy, repeats, queued_seconds))
        for op, action in (("quantise", quantise), ("dequantise", dequantise))
    ]


def _queued(run: Callable[[], None], hold: Callable[[], None]) -> float:
    """Seconds of a block in a row of them that the GPU finds in its queue."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold()
    begun.record()
    for _ in range(QUEUED):
        run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / QUEUED


def _block(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    return k, v


def _copying(k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
    copies = torch.empty_like(k), torch.empty_like(v)

    def copy() -> None:
        for source, into in zip((k, v), copies, strict=True):
            into.copy_(source)

    return copy


def _path(codec: Codec) -> str:
    if codec is RAW:
        return "copy"
    return "c++" if codec.native is not None and codec.native().available() else "eager"


def _in_turns(
    action: Callable[[], None],
    copy: Callable[[], None],
    repeats: int,
    seconds_of: Callable[[Callable[[], None]], float],
) -> tuple[float, float]:
    """Median seconds of both, one after the other, so that what else the machine does hits both."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 3):
        for times, run in zip(spent, (action, copy), strict=True):
            seconds = seconds_of(run)
            if turn >= 3:  # the first ones compile and warm up
                times.append(seconds)
    return statistics.median(spent[0]), statistics.median(spent[1])


def _clocked(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _table(rows: Sequence[CodecRate]) -> str:
    head = f"{'op':<11}{'codec':<7}{'device':<7}{'threads':>7}  {'path':<9}{'tokens':>7}{'GB/s':>9}{'memcpy':>9}"
    lines = [
        f"{row.op:<11}{row.codec:<7}{row.device:<7}{row.threads:>7}  {row.path:<9}{row.tokens:>7}"
        f"{row.gbps_16bit:>9.2f}{row.memcpy_gbps:>9.2f}"
        for row in rows
    ]
    shape = f"blocks of tokens x {HEADS} heads x {HEAD_DIM}, bf16, K and V; GB/s of 16-bit values; measured"
    on_gpu = [row.of_memcpy for row in rows if row.device == "cuda" and row.path == "triton"]
    if on_gpu:
        lines.append(f"GPU: at least {min(on_gpu):.2f} of a device copy; the target is {GPU_TARGET:.2f}")
    return "\n".join([shape, head, *lines])


def _codecs(text: str) -> list[Codec]:
    try:
        return [codec_named(name) for name in text.split(",")]
    except CodecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="p2pserve.kernels.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--codecs", type=_codecs, default=list(CODECS), help="comma-separated (default: all)")
    parser.add_argument("--tokens", type=_count, default=DEFAULT_TOKENS, help="tokens per block (default: %(default)s)")
    parser.add_argument(
        "--threads", type=_counts, default=[1, 2], help="comma-separated numbers of CPU threads (default: 1,2)"
    )
    parser.add_argument("--repeats", type=_count, default=40, help="measurements per figure (default: %(default)s)")
    parser.add_argument("--mode", choices=("eager", "compiled"), default="compiled", help="code for the CPU")
    options = parser.parse_args(arguments)
    accelerate.set_mode(options.mode)
    rows = []
    codecs = options.codecs
    for threads in options.threads:
        torch.set_num_threads(threads)
        for codec in codecs:
            rows += measure(codec, threads, options.tokens, options.repeats)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        # The largest beyond any cache, where a GPU is wholly busy.
        for tokens in (*GPU_TOKENS, 64 * options.tokens):
            for codec in codecs:
                rows += measure_on_gpu(codec, device, tokens, options.repeats)
    text = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) if options.format == "json" else _table(rows)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
