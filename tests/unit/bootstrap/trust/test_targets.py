"""What may stand after `--bootstrap`."""

import pytest

from p2pserve.bootstrap import AddressError, Bootstrap, Identity, JoinTarget, NetworkKey, Role, TokenError
from p2pserve.bootstrap.trust.targets import parse_join_target

PEER = Identity(b"p" * 32).peer_id
NAMED = Bootstrap("203.0.113.7", 4001, PEER)
TOKEN = NetworkKey(b"k" * 32).issue((NAMED,), Role.WORKER, 1000.0)
OTHER = NetworkKey(b"k" * 32).issue((), Role.CLIENT, 1000.0)
ANY = Bootstrap("203.0.113.8", 4001)


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        (TOKEN, None, JoinTarget(TOKEN, (NAMED,))),
        (f"{TOKEN},203.0.113.8:4001", None, JoinTarget(TOKEN, (ANY, NAMED))),
        (f" 203.0.113.8:4001 , {TOKEN} ,", None, JoinTarget(TOKEN, (ANY, NAMED))),
        ("203.0.113.8:4001", TOKEN, JoinTarget(TOKEN, (ANY, NAMED))),
        ("203.0.113.8:4001", None, JoinTarget(None, (ANY,))),
        (f"203.0.113.7:4001/{PEER}", OTHER, JoinTarget(OTHER, (NAMED,))),
        (f"203.0.113.7:4001/{PEER}", TOKEN, JoinTarget(TOKEN, (NAMED,))),
        (TOKEN, OTHER, JoinTarget(TOKEN, (NAMED,))),  # the one in the text is meant, whatever the environment has
        (
            "[2001:db8::7]:4001,box.example:1",
            OTHER,
            JoinTarget(OTHER, (Bootstrap("2001:db8::7", 4001), Bootstrap("box.example", 1))),
        ),
    ],
)
def test_good_targets(text: str, token: str | None, expected: JoinTarget) -> None:
    assert parse_join_target(text, token) == expected


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("", AddressError, "names nothing"),
        (" , ", AddressError, "names nothing"),
        (f"{TOKEN},{OTHER}", TokenError, "2 join tokens were given; give one"),
        ("p2p_worker_x", TokenError, "malformed"),
        ("nowhere", AddressError, "bootstrap: 'nowhere' has no port"),
        (f"{TOKEN},nowhere", AddressError, "bootstrap: 'nowhere' has no port"),
        ("203.0.113.8:0", AddressError, "has port 0; write the port"),
        ("203.0.113.8:4001/nobody", AddressError, "is not a peer id"),
        (",".join(f"203.0.113.8:{4000 + index}" for index in range(17)), AddressError, "at most 16"),
    ],
)
def test_bad_targets_are_told_in_one_line(text: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        parse_join_target(text)
    assert "\n" not in str(caught.value)


def test_sixteen_addresses_are_not_too_many() -> None:
    text = ",".join(f"203.0.113.8:{4000 + index}" for index in range(16))
    assert len(parse_join_target(text).members) == 16


def test_a_member_is_shown_as_it_is_written() -> None:
    assert str(Bootstrap("2001:db8::7", 4001)) == "[2001:db8::7]:4001"
