"""Compiled code beside the reference: when it is made, what happens where it cannot be, and that its bytes agree."""

from __future__ import annotations

import logging
import math
import shutil
import threading
from pathlib import Path

import pytest
import torch

from p2pserve.kernels import accelerate, kv4_native, kv4_reference, native
from p2pserve.kernels.accelerate import AUTO_AFTER_BYTES, Accelerated, Mode, Outputs
from p2pserve.kernels.blocks import clamped
from p2pserve.kernels.codec import decode, encode
from p2pserve.kernels.errors import CodecError, NonFiniteError, PayloadError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> accelerate._Process:
    """A process that has coded nothing yet."""
    fresh = accelerate._Process()
    monkeypatch.setattr(accelerate, "_PROCESS", fresh)
    return fresh


def twice(x: torch.Tensor, y: torch.Tensor) -> Outputs:
    return x * 2 + y, x.sum(0)


class TestModes:
    def test_the_environment_chooses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P2PSERVE_KERNELS", "eager")
        assert accelerate.mode() is Mode.EAGER
        assert not accelerate.ready(10 * AUTO_AFTER_BYTES)

    def test_an_unknown_mode_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P2PSERVE_KERNELS", "fast")
        with pytest.raises(CodecError, match="P2PSERVE_KERNELS='fast' is not a mode of the kernels; known are auto"):
            accelerate.mode()
        with pytest.raises(CodecError, match="quick"):
            accelerate.set_mode("quick")

    def test_auto_waits_for_enough_work(self) -> None:
        accelerate.set_mode("auto")
        assert not accelerate.ready(AUTO_AFTER_BYTES - 1)
        assert accelerate.ready(1)
        assert accelerate.ready(1)

    def test_eager_compiles_nothing(self) -> None:
        accelerate.set_mode("eager")
        function = Accelerated("twice", twice, varies=(0, 0))
        assert function(torch.ones(3, 2), torch.ones(3, 2)) is None
        assert function._compiled == {}

    @pytest.mark.parametrize("mode", ["auto", "compiled"])
    def test_where_nothing_can_be_compiled_the_reference_goes_on(
        self, mode: str, process: accelerate._Process, caplog: pytest.LogCaptureFixture
    ) -> None:
        def impossible(x: torch.Tensor) -> Outputs:
            raise RuntimeError("no compiler\nand more lines")

        accelerate.set_mode(mode)
        one, two = (Accelerated(name, impossible, varies=(0,)) for name in ("one", "two"))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert one(torch.ones(3)) is None
                assert two(torch.ones(3)) is None
                process.submit(lambda: None).wait()  # all that was submitted before is done
        assert [record.getMessage() for record in caplog.records] == [
            "KV codecs stay with plain torch: compiling one: RuntimeError: no compiler"
        ]
        assert accelerate.failure() == "RuntimeError: no compiler"


@needs_compiler
class TestCompiled:
    def test_one_compilation_serves_all_sizes_and_each_shape_has_its_own(self) -> None:
        accelerate.set_mode("compiled")
        function = Accelerated("twice", twice, varies=(0, 0))
        for rows in (1, 2, 7, 5000):
            x, y = torch.rand(rows, 3), torch.rand(rows, 3)
            got = function(x, y.t().contiguous().t())
            assert got is not None
            assert torch.equal(got[0], x * 2 + y)
            assert torch.allclose(got[1], x.sum(0), rtol=1e-4)
        assert len(function._compiled) == 1

    def test_auto_switches_when_it_is_ready(self, process: accelerate._Process) -> None:
        accelerate.set_mode("auto")
        function = Accelerated("twice", twice, varies=(0, 0))
        x = torch.rand(4, 3)
        assert function(x, x) is None
        process.submit(lambda: None).wait()
        got = function(x, x)
        assert got is not None
        assert torch.equal(got[0], x * 3)


@needs_compiler
class TestKv4:
    """The C++ library beside the reference."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
    def test_all_shapes_and_scales_agree(self, dtype: torch.dtype, head_dim: int) -> None:
        accelerate.set_mode("compiled")
        generator = torch.Generator().manual_seed(head_dim)
        for scale, shift in ((1e-3, 0.0), (1.0, 100.0), (300.0, 0.0)):
            k = (torch.randn(512, 2 * head_dim, generator=generator) * scale + shift).to(dtype)
            k[:, 3], k[:, 5] = 5.0, k[:, 5] * 0  # constant, and zeros of both signs
            v = (torch.randn(203, head_dim, generator=generator) ** 3 * scale).to(dtype)
            v[7], v[8] = 0.0, -3.0
            keys, values = kv4_reference.quantise_keys(k), kv4_reference.quantise_values(v)
            got_keys, got_values = kv4_native.quantise_keys(k), kv4_native.quantise_values(v)
            assert got_keys is not None
            assert got_values is not None
            for found, expected in zip((*got_keys[0], *got_values[0]), (*keys, *values), strict=True):
                assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
            decoded, back = kv4_native.dequantise_keys(keys), torch.empty_like(v)
            assert decoded is not None
            assert kv4_native.dequantise_values(values, back)
            plain_k = clamped(kv4_reference.dequantise_keys(keys), dtype)
            plain_v = clamped(kv4_reference.dequantise_values(values, head_dim), dtype)
            assert torch.equal(decoded[0].view(torch.int16), plain_k.view(torch.int16))
            assert torch.equal(back.view(torch.int16), plain_v.view(torch.int16))

    @pytest.mark.parametrize("threads", [1, 3])
    def test_the_number_of_threads_changes_nothing(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerate.set_mode("compiled")
        monkeypatch.setattr(kv4_native, "threads", lambda _: threads)
        v = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        found = kv4_native.quantise_values(v)
        assert found is not None
        assert all(map(torch.equal, found[0], kv4_reference.quantise_values(v)))

    def test_without_a_compiler_the_reference_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        accelerate.set_mode("compiled")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        with caplog.at_level(logging.WARNING):
            assert native.Library("kv4.cpp").get() is None
        assert "kv4.cpp: KV codecs stay with plain torch: no C++ compiler was found" in caplog.text

    def test_a_folder_that_others_can_write_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        accelerate.set_mode("compiled")
        tmp_path.chmod(0o777)
        monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path))
        with caplog.at_level(logging.WARNING):
            assert native.Library("kv4.cpp").get() is None
        assert "can be written by others" in caplog.text
        assert not list(tmp_path.iterdir())

    def test_it_is_built_once_and_found_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        accelerate.set_mode("compiled")
        monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path / "new"))
        assert native.Library("kv4.cpp").get() is not None
        (built,) = (tmp_path / "new").iterdir()
        before = built.stat().st_mtime_ns
        assert native.Library("kv4.cpp").get() is not None
        assert built.stat().st_mtime_ns == before

    def test_compiled_code_makes_the_same_bytes(self) -> None:
        for tokens, start in ((1, 0), (9, 30), (70, 2), (256, 256), (513, 100), (600, 0)):
            k, v = self.block(tokens, 2, 64, torch.bfloat16)
            results = []
            for mode in ("eager", "compiled"):
                accelerate.set_mode(mode)
                payload = bytes(encode("kv4", k, v, start=start, layer=0))
                results.append((payload, *self.decoded(payload, k, start)))
            assert accelerate.failure() == ""
            assert results[0][0] == results[1][0]
            assert torch.equal(results[0][1], results[1][1])
            assert torch.equal(results[0][2], results[1][2])

    def test_a_corrupt_payload_is_named_by_both(self) -> None:
        k, v = self.block(256, 2, 64, torch.bfloat16)
        accelerate.set_mode("eager")
        payload = bytearray(encode("kv4", k, v, start=256, layer=0))
        payload[16 + 2 * 70 : 16 + 2 * 71] = b"\xff\x7f"
        texts = []
        for mode in ("eager", "compiled"):
            accelerate.set_mode(mode)
            with pytest.raises(PayloadError, match="K has a parameter nan at position 256, head 1, channel 6") as got:
                self.decoded(payload, k, 256)
            texts.append(str(got.value))
        assert texts[0] == texts[1]

    def test_values_that_cannot_be_coded_are_named_by_both(self) -> None:
        for tensor, bad in (("K", math.nan), ("K", -math.inf), ("V", math.nan), ("V", 2.0**31)):
            k, v = (torch.ones(300, 2, 64, dtype=torch.bfloat16) for _ in range(2))
            (k if tensor == "K" else v)[260, 1, 33] = bad
            texts = []
            for mode in ("eager", "compiled"):
                accelerate.set_mode(mode)
                with pytest.raises(
                    NonFiniteError, match=f"layer 5: {tensor} is .* position 360, head 1, channel 33"
                ) as e:
                    encode("kv4", k, v, start=100, layer=5)
                texts.append(str(e.value))
            assert texts[0] == texts[1]

    def test_many_threads_at_once(self) -> None:
        accelerate.set_mode("compiled")
        generator = torch.Generator().manual_seed(0)
        blocks = [torch.randn(40 + 100 * i, 2, 64, generator=generator).to(torch.bfloat16) for i in range(6)]
        expected = [kv4_reference.quantise_values(x.view(-1, 64)) for x in blocks]
        wrong: list[int] = []

        def work(i: int) -> None:
            for _ in range(5):
                found = kv4_native.quantise_values(blocks[i].view(-1, 64))
                if found is None or not all(map(torch.equal, found[0], expected[i])):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(blocks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def block(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels of very different size, some far from 0; constant vectors; vectors that fade out."""
        generator = torch.Generator().manual_seed(tokens)
        k, v = (torch.randn(tokens, heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        k = k * 2.0 ** (torch.arange(head_dim) % 9 - 4).to(dtype) + 100 * (torch.arange(head_dim) % 5 == 0)
        v[:: max(1, tokens // 3)] = 0.75
        v[tokens // 2 :] *= 2.0 ** -(torch.arange(tokens - tokens // 2) % 20).view(-1, 1, 1).to(dtype)
        return k, v

    def decoded(self, payload: bytes | bytearray, like: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, head_dim = like.shape
        return decode(
            "kv4", payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=like.dtype, start=start, layer=0
        )
