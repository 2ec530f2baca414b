"""C++ beside the reference: when it is built, what happens where it cannot be, and that its bytes
agree.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from p2pserve.kernels import accelerate, native
from p2pserve.kernels.accelerate import AUTO_AFTER_BYTES, KernelMode
from p2pserve.kernels.codec import decode, encode
from p2pserve.kernels.errors import CodecError, NonFiniteError, PayloadError
from p2pserve.kernels.fp8 import native as fp8_native
from p2pserve.kernels.kivi4 import native as kivi4_native
from p2pserve.kernels.kv4 import native as kv4_native

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

NATIVE = {"kv4": kv4_native, "fp8": fp8_native, "kivi4": kivi4_native}
SOURCE = Path(kv4_native.__file__).with_name("kv4.cpp")


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A process that has coded nothing yet."""
    accelerate.restart()
    yield
    accelerate.restart()


class TestModes:
    def test_the_environment_chooses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P2PSERVE_KERNELS", "eager")
        assert accelerate.mode() is KernelMode.EAGER
        accelerate.count_coded(10 * AUTO_AFTER_BYTES)
        assert not accelerate.is_worth_building()

    def test_an_unknown_mode_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P2PSERVE_KERNELS", "fast")
        with pytest.raises(CodecError, match="P2PSERVE_KERNELS='fast' is not a mode of the kernels; known are auto"):
            accelerate.mode()
        with pytest.raises(CodecError, match="quick"):
            accelerate.set_mode("quick")

    def test_auto_waits_for_enough_work(self) -> None:
        accelerate.set_mode("auto")
        accelerate.count_coded(AUTO_AFTER_BYTES - 1)
        assert not accelerate.is_worth_building()
        accelerate.count_coded(1)
        assert accelerate.is_worth_building()
        accelerate.restart()
        accelerate.set_mode("compiled")
        assert accelerate.is_worth_building()

    def test_eager_builds_nothing(self) -> None:
        accelerate.set_mode("eager")
        library = native.Library(SOURCE)
        assert library.get() is None
        assert "not loaded" in repr(library)


@needs_compiler
class TestLibrary:
    """Any of the sources: how it is built, and what happens where it cannot be."""

    def test_without_a_compiler_the_reference_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        accelerate.set_mode("compiled")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        with caplog.at_level(logging.WARNING):
            assert native.Library(SOURCE).get() is None
        assert "kv4.cpp: KV codecs stay with plain torch: no C++ compiler was found" in caplog.text
        assert "apt-get install g++" in caplog.text

    def test_auto_switches_when_it_is_ready(self) -> None:
        accelerate.set_mode("auto")
        accelerate.count_coded(AUTO_AFTER_BYTES)
        library = native.Library(SOURCE)
        may_build = threading.Event()

        def hold() -> None:
            may_build.wait()

        accelerate.build_beside(hold)
        assert library.get() is None
        assert library.get() is None, "asked for twice, built once"
        may_build.set()
        join_builds()
        assert library.get() is not None

    def test_auto_takes_what_is_there_and_builds_nothing_before_it_is_worth_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A small network, as the demo's, never codes so much KV."""
        monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path / "new"))
        source = tmp_path / "small.cpp"
        source.write_text('extern "C" int answer() { return 42; }', encoding="utf-8")

        def auto() -> native.Library:
            accelerate.set_mode("auto")
            library = native.Library(source)
            library.get()
            join_builds()
            return library

        nothing = auto()
        assert nothing.get() is None
        assert not (tmp_path / "new").exists()
        accelerate.set_mode("compiled")
        assert native.Library(source).get() is not None
        found = auto().get()
        assert found is not None
        assert found.answer() == 42
        (tmp_path / "new").chmod(0o777)  # others may have put it there
        assert auto().get() is None

    def test_a_folder_that_others_can_write_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        accelerate.set_mode("compiled")
        tmp_path.chmod(0o777)
        monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path))
        with caplog.at_level(logging.WARNING):
            assert native.Library(SOURCE).get() is None
        assert "can be written by others" in caplog.text
        assert not list(tmp_path.iterdir())

    def test_it_is_built_once_and_found_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        accelerate.set_mode("compiled")
        monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path / "new"))
        source = tmp_path / "small.cpp"
        source.write_text('extern "C" int answer() { return 42; }', encoding="utf-8")
        first = native.Library(source).get()
        assert first is not None
        assert first.answer() == 42
        (built,) = (tmp_path / "new").iterdir()
        before = built.stat().st_mtime_ns
        assert native.Library(source).get() is not None
        assert built.stat().st_mtime_ns == before


@needs_compiler
@pytest.mark.parametrize("codec", NATIVE)
class TestCodecs:
    """Whole payloads by C++ and by the reference."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
    def test_both_make_the_same_bytes_and_values(
        self, codec: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = recorded(codec, monkeypatch)
        for tokens, start in ((9, 30), (70, 2), (256, 256), (300, 100)):
            k, v = block(tokens, 2, head_dim, dtype)
            results = []
            for mode in ("eager", "compiled"):
                accelerate.set_mode(mode)
                payload = bytes(encode(codec, k, v, start=start, layer=0))
                results.append((payload, *decoded(codec, payload, k, start)))
            assert results[0][0] == results[1][0]
            for plain, quick in zip(results[0][1:], results[1][1:], strict=True):
                assert torch.equal(plain.view(torch.int16), quick.view(torch.int16))
        assert calls.count(True) >= 6  # there and back, of the three longer blocks
        assert False not in calls

    def test_the_number_of_threads_changes_nothing(self, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerate.set_mode("compiled")
        k, v = block(600, 3, 64, torch.bfloat16)
        payloads = []
        for count in (1, 3):
            monkeypatch.setattr(NATIVE[codec], "threads", lambda _, count=count: count)
            payload = bytes(encode(codec, k, v, start=0, layer=0))
            payloads.append((payload, *(x.view(torch.int16).tolist() for x in decoded(codec, payload, k, 0))))
        assert payloads[0] == payloads[1]

    def test_many_callers_at_once(self, codec: str) -> None:
        blocks = [block(40 + 100 * i, 2, 64, torch.bfloat16) for i in range(6)]
        accelerate.set_mode("eager")
        expected = [bytes(encode(codec, k, v, start=0, layer=0)) for k, v in blocks]
        accelerate.set_mode("compiled")
        with ThreadPoolExecutor(len(blocks)) as pool:
            runs = [pool.submit(encode, codec, k, v, start=0, layer=0) for _ in range(5) for k, v in blocks]
        assert [bytes(run.result()) for run in runs] == expected * 5

    def test_a_corrupt_payload_is_named_by_both(self, codec: str) -> None:
        k, v = block(256, 2, 64, torch.bfloat16)
        accelerate.set_mode("eager")
        payload = bytearray(encode(codec, k, v, start=256, layer=0))
        payload[16 + 2 * 70 : 16 + 2 * 71] = b"\xff\x7f"
        texts = []
        for mode in ("eager", "compiled"):
            accelerate.set_mode(mode)
            with pytest.raises(PayloadError, match=r"K has .* nan at position 256, head 1, channel 6") as got:
                decoded(codec, payload, k, 256)
            texts.append(str(got.value))
        assert texts[0] == texts[1]

    def test_values_that_cannot_be_coded_are_named_by_both(self, codec: str) -> None:
        for tensor, bad in (("K", math.nan), ("K", -math.inf), ("V", math.nan), ("V", 2.0**121)):
            k, v = (torch.ones(300, 2, 64, dtype=torch.bfloat16) for _ in range(2))
            (k if tensor == "K" else v)[260, 1, 33] = bad
            texts = []
            for mode in ("eager", "compiled"):
                accelerate.set_mode(mode)
                with pytest.raises(
                    NonFiniteError, match=f"layer 5: {tensor} is .* position 360, head 1, channel 33"
                ) as e:
                    encode(codec, k, v, start=100, layer=5)
                texts.append(str(e.value))
            assert texts[0] == texts[1]


def join_builds() -> None:
    """Wait for what is built or loaded beside."""
    for thread in [thread for thread in threading.enumerate() if thread.name == "kernels-build"]:
        thread.join()


def recorded(codec: str, monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What the C++ of a codec says from now on, call by call."""
    calls: list[bool | None] = []

    def recording(function: Callable[..., bool | None]) -> Callable[..., bool | None]:
        def call(*given: object) -> bool | None:
            calls.append(function(*given))
            return calls[-1]

        return call

    for name in ("quantise", "dequantise"):
        monkeypatch.setattr(NATIVE[codec], name, recording(getattr(NATIVE[codec], name)))
    return calls


def block(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels of very different size, some far from 0; constant vectors; vectors that fade out."""
    generator = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(tokens, heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    k = k * 2.0 ** (torch.arange(head_dim) % 9 - 4).to(dtype) + 100 * (torch.arange(head_dim) % 5 == 0)
    v[:: max(1, tokens // 3)] = 0.75
    v[tokens // 2 :] *= 2.0 ** -(torch.arange(tokens - tokens // 2) % 20).view(-1, 1, 1).to(dtype)
    return k, v


def decoded(
    codec: str, payload: bytes | bytearray, like: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, head_dim = like.shape
    return decode(codec, payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=like.dtype, start=start, layer=0)
