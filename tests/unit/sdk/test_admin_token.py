"""The admin token as it is given to a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pserve.sdk.actions.http_options import read_admin_token
from p2pserve.sdk.errors import UsageError

TOKEN = "correct horse battery"


def test_it_comes_from_the_command_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_admin_token(None, None) is None
    assert read_admin_token(TOKEN, None) == read_admin_token(None, file) == TOKEN


def test_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="admin-token: it has to be at least 16"):
        read_admin_token("short", None)
    with pytest.raises(UsageError, match=r"admin_token_file: .*/none cannot be read: No such file"):
        read_admin_token(None, tmp_path / "none")
    with pytest.raises(UsageError, match="it is not ASCII text"):
        read_admin_token(None, file)
    with pytest.raises(UsageError, match="give either the token or a file"):
        read_admin_token(TOKEN, file)
