"""The recipe for a codec in docs/extending.md, followed: the text's own code, in a copy of the
room.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

CHECK = """
import sys

from p2pserve.kernels.codecs import CODECS, codec_from_wire, codec_named
from p2pserve.kernels.format import WireDtype, payload_bytes
from p2pserve.kvtransport.wire.tickets import issue_transfer
from p2pserve.sdk.commands.checks import demo

codec = codec_named("top8")
assert codec_from_wire(codec.wire) is codec and codec in CODECS
assert len({codec.wire for codec in CODECS}) == len({codec.name for codec in CODECS}) == len(CODECS)
assert payload_bytes(codec, WireDtype.BF16, start=3, tokens=5, heads=2, head_dim=8) == 16 + 2 * 80
assert demo.make_context("demo", ["--codec", "top8"]).params["codec"] == "top8"
assert issue_transfer(bytes(16), "top8", 10.0, lambda n: b"x" * n).codec == "top8"
assert "torch" not in sys.modules, "sizes need no torch"

import torch

from p2pserve.kernels.codec import decode, encode
from p2pserve.kernels.errors import NonFiniteError, PayloadError

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    k, v = (torch.randn(5, 2, 8).to(dtype) for _ in range(2))
    payload = encode("top8", k, v, start=3, layer=0)
    assert len(payload) == 176
    shape = {"tokens": 5, "heads": 2, "head_dim": 8, "dtype": dtype, "start": 3, "layer": 0}
    for given, got in zip((k, v), decode("top8", payload, **shape), strict=True):
        sixteen = torch.float16 if dtype is torch.float16 else torch.bfloat16
        upper = [x.to(sixteen).view(torch.uint8).view(-1, 2) for x in (given, got)]
        assert torch.equal(upper[0][:, 1], upper[1][:, 1]) and not upper[1][:, 0].any()
        again = encode("top8", got, got, start=3, layer=0)  # what is decoded is a value that the codec can hold
        assert torch.equal(decode("top8", again, **shape)[0], got)
    k[4, 1, 7] = float("nan")
    try:
        encode("top8", k, v, start=3, layer=6)
    except NonFiniteError as error:
        assert "layer 6: K is nan at position 7, head 1, channel 7; top8 needs" in str(error), error
    else:
        raise AssertionError("NaN was coded")
try:
    decode("top8", b"\\x02" + bytes(payload)[1:], **shape)
except PayloadError as error:
    assert "top8 version 2; this build reads version 1" in str(error), error
else:
    raise AssertionError("another version was read")
"""


def recipe() -> tuple[str, str, str]:
    """The new file's text, and the two lines of the registry."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = re.search(r"^## A codec\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    source, registry = re.findall(r"```python\n(.*?)```", section[1], flags=re.DOTALL)
    added, listed = (line for line in registry.splitlines() if line)
    return source, added, listed


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of which only `kernels` is a copy, changed as the recipe says."""
    source, added, listed = recipe()
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "p2pserve"
    package.mkdir()
    for room in (ROOT / "p2pserve").iterdir():
        target = tmp_path / "kernels" if room.name == "kernels" else room.resolve()
        if room.name != "__pycache__":
            (package / room.name).symlink_to(target)
    (tmp_path / "kernels" / "top8.py").write_text(source, encoding="utf-8")
    registry = tmp_path / "kernels" / "codecs.py"
    text = registry.read_text(encoding="utf-8")
    changed = re.sub(r"^CODECS: Final = .*$", f"{added}\n{listed}", text, count=1, flags=re.MULTILINE)
    assert changed != text
    registry.write_text(changed, encoding="utf-8")
    return tmp_path


def test_one_file_and_one_line_make_a_codec(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        cwd=checkout,
        env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "P2PSERVE_KERNELS": "eager"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
