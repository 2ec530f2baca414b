"""What a join string becomes, and the key of a new network."""

from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import AddressError, Bootstrap, Identity, NetworkKey, Role, TokenError
from p2pserve.bootstrap.join_targets import read_join_target
from p2pserve.node.joining import accept_invitation, new_network

KEY = NetworkKey(b"k" * 32)
PEER = Identity(b"p" * 32)
HERE = Bootstrap("203.0.113.7", 4001, PEER.peer_id)
WORKER = KEY.issue((HERE,), Role.WORKER, 2e9)
BARE = KEY.issue((), Role.WORKER, 2e9)


def test_a_token_alone_names_its_members() -> None:
    found = trio.run(accept_invitation, WORKER, None)
    assert (found.network, found.token, found.role, found.bootstraps, found.owner) == (
        KEY.public,
        WORKER,
        Role.WORKER,
        (HERE,),
        None,
    )


@pytest.mark.parametrize(("where", "token"), [(f"{BARE},198.51.100.2:4001", None), ("198.51.100.2:4001", BARE)])
def test_any_member_may_be_named_by_its_address(where: str, token: str | None) -> None:
    assert trio.run(accept_invitation, where, token).bootstraps == (Bootstrap("198.51.100.2", 4001),)


def test_given_addresses_are_asked_before_those_of_the_token() -> None:
    text, members = trio.run(read_join_target, f"{WORKER},198.51.100.2:4001", None)
    assert (text, members) == (WORKER, (Bootstrap("198.51.100.2", 4001), HERE))


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        (KEY.issue((HERE,), Role.CLIENT, 2e9), TokenError, "a client's token; a node joins with a worker's line"),
        (BARE, TokenError, "names no member to ask; give the address of one beside it"),
        ("nowhere", AddressError, "bootstrap: 'nowhere' has no port"),
    ],
)
def test_bad_join_strings(where: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        trio.run(accept_invitation, where, None)
    assert "\n" not in str(caught.value)


def test_the_key_of_a_network_is_made_once(tmp_path: Path) -> None:
    first, again = (new_network(tmp_path, pytest.fail) for _ in range(2))
    assert first.network == again.network
    assert first.token == again.token
    assert first.owner is not None
