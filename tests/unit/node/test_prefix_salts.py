"""Whose requests share cached prompts."""

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.node.prefixes.salts import CacheSalts
from p2pserve.node.requests.local_clients import local_client
from p2pserve.node.web.keys import KeyFault, parse_keys

SALTS = CacheSalts(network=b"net", gateway="g1", caches={"alice": "team", "bob": "team"})


def test_keys_share_only_where_their_owner_lets_them() -> None:
    alice, bob, carol, dave, nobody = (
        SALTS.salt_for(local_client(name), "") for name in ("alice", "bob", "carol", "dave", "")
    )
    assert alice == bob
    assert len({alice, carol, dave, nobody}) == 4


def test_a_key_has_one_cache_whatever_its_requests() -> None:
    assert SALTS.salt_for(local_client("carol"), "") == SALTS.salt_for(local_client("carol"), "")


def test_who_has_no_key_shares_with_others_of_the_network_but_not_where_it_asks_for_a_cache_of_its_own() -> None:
    one, two = SALTS.salt_for(PeerId("c1"), ""), SALTS.salt_for(PeerId("c2"), "")
    assert one == two == SALTS.salt_for(local_client(""), "")
    assert SALTS.salt_for(PeerId("c1"), "mine") != one


@pytest.mark.parametrize("asked", ["carol", "team", "g1/carol", "key/g1/carol", "local:carol"])
def test_nobody_gets_at_a_keys_cache_by_what_it_asks_for(asked: str) -> None:
    keyed = {SALTS.salt_for(local_client(name), "") for name in ("alice", "carol")}
    for client in (PeerId("stranger"), local_client(""), local_client("dave")):
        assert SALTS.salt_for(client, asked) not in keyed


def test_the_same_names_elsewhere_are_other_tenants() -> None:
    other_network = CacheSalts(network=b"other", gateway="g1", caches=SALTS.caches)
    other_gateway = CacheSalts(network=b"net", gateway="g2", caches=SALTS.caches)
    for name in ("alice", "carol", ""):
        assert other_network.salt_for(local_client(name), "") != SALTS.salt_for(local_client(name), "")
    assert other_gateway.salt_for(local_client("carol"), "") != SALTS.salt_for(local_client("carol"), "")
    assert other_gateway.salt_for(local_client("alice"), "") == SALTS.salt_for(local_client("alice"), "")


def test_a_file_of_keys_says_which_share_a_cache() -> None:
    keys = parse_keys(["sk-11111111 name=alice cache=team", "sk-22222222 name=bob"])
    assert [(key.name, key.cache) for key in keys] == [("alice", "team"), ("bob", "")]
    for bad in ("cache=", f"cache={'x' * 65}", "cache=\x07"):
        with pytest.raises(KeyFault, match="cache="):
            parse_keys([f"sk-11111111 {bad}"])
