"""What `topology` writes to files, and what it then leaves to them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.seeing import actions

from .networks import network

PLAIN = {"watch": False, "sites": (), "boxes": (), "fold": None, "show": "rate", "svg": None, "png": None, "json": None}


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a network of eight boxes."""

    @contextmanager
    def client_of(arguments: SimpleNamespace) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(status=lambda: network(8))

    monkeypatch.setattr(actions, "client_of", client_of)
    return lambda **options: actions.topology(SimpleNamespace(**{**PLAIN, "format": "table", **options}))


def test_json_goes_to_a_file_and_nothing_else_is_printed(
    look: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "network.json"
    look(json=file, svg=tmp_path / "network.svg")
    assert capsys.readouterr().out == ""
    assert len(json.loads(file.read_text())["nodes"]) == 8
    assert (tmp_path / "network.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("options", [{"json": actions.STDOUT}, {"format": "json"}])
def test_json_without_a_file_is_the_format(
    look: Any, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    look(**options)
    assert len(json.loads(capsys.readouterr().out)["nodes"]) == 8


def test_a_json_file_that_cannot_be_written_is_named(look: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"json: .* cannot be written: No such file"):
        look(json=tmp_path / "not" / "network.json")
