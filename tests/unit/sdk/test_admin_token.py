"""The admin token as it is given to a command."""

from __future__ import annotations

import random

import pytest

from p2pserve.bootstrap import Address, Identity, NetworkKey, Role
from p2pserve.bootstrap.network import Network
from p2pserve.bootstrap.testing import MemoryNetwork
from p2pserve.node.http.admission import FrontRules
from p2pserve.sdk.actions.gateway import rules_of
from p2pserve.sdk.actions.http_options import read_admin_token
from p2pserve.sdk.errors import UsageError

TOKEN = "correct horse battery"


def test_what_is_none_is_refused_by_name() -> None:
    assert read_admin_token(None) is None
    assert read_admin_token(TOKEN) == TOKEN
    for text in ("short", "caf\N{LATIN SMALL LETTER E WITH ACUTE} " * 5):
        with pytest.raises(UsageError, match="admin-token: it has to be at least 16"):
            read_admin_token(text)


def network_of(role: Role) -> Network:
    identity, key, nowhere = Identity.generate(), NetworkKey.generate(), Address("0.0.0.0", 0)
    return Network(
        transport=MemoryNetwork().transport(identity, nowhere),
        identity=identity,
        token=key.issue((), role, 1e12),
        network_key_public=key.public,
        role=Role.CLIENT,
        announce=nowhere,
        bootstraps=(),
        rng=random.Random(1),
    )


def test_a_gateway_carries_what_its_join_token_lets_it_and_takes_no_admin_token_for_nothing() -> None:
    for rules in (FrontRules(keys=("secret-1",)), FrontRules(admin_token=TOKEN)):
        network = network_of(Role.ADMIN)
        found = rules_of(network, rules)
        assert found.realm == network.peer_id
        assert (found.role, found.keys, found.admin_token) == (Role.ADMIN, rules.keys, rules.admin_token)
    assert rules_of(network_of(Role.CLIENT), FrontRules()).role is Role.CLIENT
    with pytest.raises(UsageError, match=r"^admin_token: with a client's join token .* token create --role admin$"):
        rules_of(network_of(Role.CLIENT), FrontRules(admin_token=TOKEN))
