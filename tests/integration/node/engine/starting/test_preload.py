"""What a fork server's engines find imported."""

import subprocess
import sys

import pytest

from p2pserve.node.engine.gpus import has_gpu

_LOOK = """
from p2pserve.node.engine.vllm_program.preload import preload
preload()
import sys, torch
def plain(x):
    return x + 1
assert torch.compile(plain, dynamic=True) is plain
print("torch._inductor.lowering" in sys.modules)
import torch._inductor.lowering
print(callable(torch._inductor.lowering.add_layout_constraint))
"""


@pytest.mark.skipif(has_gpu(), reason="a GPU's engines may compile")
def test_a_cpu_compiles_nothing_and_has_the_compiler_for_models_that_import_it() -> None:
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["False", "True"]
