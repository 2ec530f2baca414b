"""What a fork server does before it imports an engine."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from p2pserve.node.engine.vllm_program.preload import leave_out


def test_what_is_left_out_is_as_if_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wave", sys)  # so that it is put back afterwards
    del sys.modules["wave"]
    leave_out(("wave", "json"))
    assert importlib.util.find_spec("wave") is None  # how vLLM and transformers ask whether there is one
    with pytest.raises(ImportError):
        importlib.import_module("wave")
    assert importlib.import_module("json") is sys.modules["json"]  # it was there: nothing is taken away
