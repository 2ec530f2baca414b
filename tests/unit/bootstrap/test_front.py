"""The room's front door: what is public."""

import pytest

from p2pserve import bootstrap


def test_every_public_name_is_there_and_in_order() -> None:
    heavy = {"Libp2pTransport"}  # loads libp2p; the integration tests use it
    for name in set(bootstrap.__all__) - heavy:
        assert getattr(bootstrap, name) is not None
    assert sorted(bootstrap.__all__, key=lambda name: (not name.isupper(), name)) == list(bootstrap.__all__)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Netwrok'"):
        getattr(bootstrap, "Netwrok")  # noqa: B009
