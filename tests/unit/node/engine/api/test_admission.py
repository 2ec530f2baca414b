"""What the API process lets in, and which of vLLM's options are passed to it."""

from hashlib import sha256

import pytest

from p2pserve.node.engine.api.admission import Admitted, admit
from p2pserve.node.engine.api.options import ALIASES, OURS, PASSED, REFUSED, OptionRefused, check_options, write_flag
from p2pserve.node.engine.api.protocol import ApiConfig, KeyDigest
from p2pserve.node.web.listening import HttpRefusal

KEY = KeyDigest("alice", sha256(b"sk-12345678").digest())
GUARDED = ApiConfig(model="m", names=("m",), keys=(KEY,), max_body_bytes=100, deadline_s=10.0)
OPEN = ApiConfig(model="m", names=("m",))
LOCAL = (b"host", b"localhost:8000")


def judged(config: ApiConfig, *fields: tuple[bytes, bytes], is_vouched: bool = False) -> Admitted | HttpRefusal:
    return admit("POST", list(fields), config, is_vouched=is_vouched)


@pytest.mark.parametrize("field", [(b"authorization", b"Bearer sk-12345678"), (b"x-api-key", b"sk-12345678")])
def test_a_key_lets_in(field: tuple[bytes, bytes]) -> None:
    assert judged(GUARDED, field) == Admitted("alice", 10.0)


@pytest.mark.parametrize(
    ("config", "fields", "status"),
    [
        (GUARDED, [], 401),
        (GUARDED, [(b"authorization", b"Basic sk-12345678")], 401),
        (GUARDED, [(b"x-p2p-client", b"alice")], 401),
        (GUARDED, [(b"x-api-key", b"sk-12345678"), (b"content-length", b"101")], 413),
        (GUARDED, [(b"x-api-key", b"sk-12345678"), (b"content-length", b"9" * 40)], 413),
        (GUARDED, [(b"x-api-key", b"sk-12345678"), (b"x-p2p-deadline-s", b"11")], 400),
        (GUARDED, [(b"x-api-key", b"sk-12345678"), (b"x-p2p-deadline-s", b"nan")], 400),
        (OPEN, [(b"host", b"evil.example")], 403),
    ],
)
def test_what_is_wrong_is_refused(config: ApiConfig, fields: list[tuple[bytes, bytes]], status: int) -> None:
    refused = judged(config, *fields)
    assert isinstance(refused, HttpRefusal)
    assert refused.status == status


def test_without_keys_this_machine_is_let_in() -> None:
    assert judged(OPEN, LOCAL) == Admitted("", OPEN.deadline_s)


def test_whom_the_agent_vouches_for_needs_no_key() -> None:
    assert judged(GUARDED, (b"x-p2p-client", b"12D3"), is_vouched=True) == Admitted("12D3", 10.0)


def test_options_are_each_one_thing() -> None:
    assert not PASSED.keys() & OURS.keys()
    assert not PASSED.keys() & REFUSED.keys()
    assert not OURS.keys() & REFUSED.keys()
    assert {*ALIASES.values()} <= {*PASSED, *OURS, *REFUSED, "--help"}


def test_options_of_the_api_are_passed() -> None:
    given = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--no-enable-log-deltas", "--chat-template=x"]
    assert check_options(given) == tuple(given)


def test_a_switch_that_is_off_is_its_opposite_where_there_is_one() -> None:
    assert write_flag("enable-log-deltas", False) == ("--no-enable-log-deltas",)
    assert write_flag("disable-log-stats", False) == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--enable-lora"], "--enable-lora: this network serves one set of weights"),
        (["-tp", "2"], "-tp: --tp says"),
        (["--tool-call-parserr", "x"], "did you mean --tool-call-parser?"),
        (["--tool-call-parser"], "a value is missing"),
        (["--no-disable-log-stats"], "no such option; did you mean --disable-log-stats?"),
        (["word"], "word: this is no option"),
    ],
)
def test_other_options_are_refused_by_name(given: list[str], said: str) -> None:
    with pytest.raises(OptionRefused) as caught:
        check_options(given)
    assert said in str(caught.value)
