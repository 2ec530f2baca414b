"""What the owner of a network orders, and what nobody else can."""

import msgspec
import pytest

from p2pserve.bootstrap import NetworkKey
from p2pserve.bootstrap.trust.orders import MAX_REVOKED, Orders, Renewal, SignedOrders, read_orders, sign_orders

KEY, OTHER = NetworkKey(b"n" * 32), NetworkKey(b"x" * 32)
ORDERS = Orders(7, ("a" * 16, "b" * 16), {"c" * 16: Renewal(b"certificate", b"s" * 64)})


def test_orders_travel() -> None:
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(sign_orders(KEY, ORDERS)), type=SignedOrders)
    assert read_orders(travelled, KEY.public) == ORDERS


def signed_anyhow(payload: bytes) -> SignedOrders:
    """By the owner, whatever it says; the beginning tells its signatures of orders from all others."""
    return SignedOrders(payload, KEY.sign(b"p2pserve-orders-1\n" + payload))


def test_orders_of_a_later_release_count_as_far_as_they_are_understood() -> None:
    payload = msgspec.msgpack.encode([8, ["a" * 16], {}, {}, "more"])
    assert read_orders(signed_anyhow(payload), KEY.public) == Orders(8, ("a" * 16,))


GOOD = sign_orders(KEY, ORDERS)


@pytest.mark.parametrize(
    "signed",
    [
        sign_orders(OTHER, ORDERS),
        SignedOrders(GOOD.payload, bytes(64)),
        SignedOrders(GOOD.payload, b""),
        SignedOrders(msgspec.msgpack.encode(Orders(8)), GOOD.signature),
        SignedOrders(GOOD.payload, KEY.sign(GOOD.payload)),
        signed_anyhow(b""),
        signed_anyhow(b"\xc1"),
        signed_anyhow(msgspec.msgpack.encode([-1])),
        signed_anyhow(msgspec.msgpack.encode([1, ["a" * 16] * (MAX_REVOKED + 1)])),
    ],
    ids=[
        "another's",
        "no signature",
        "empty",
        "another's payload",
        "not as orders",
        "nothing",
        "junk",
        "number",
        "many",
    ],
)
def test_what_the_owner_has_not_ordered_well_formed_is_nothing(signed: SignedOrders) -> None:
    assert read_orders(signed, KEY.public) is None


@pytest.mark.parametrize("payload", [b"\x91" * 100_000, b"\x93\x01\x91\xa2\xff\xfe\x80"])
def test_orders_of_an_owner_gone_mad_raise_nothing(payload: bytes) -> None:
    assert read_orders(signed_anyhow(payload), KEY.public) is None


# -- documents --------------------------------------------------------------------------------------------------------

TOLD = Orders(8, ("a" * 16,), {}, {"services": b"what nodes read"})


def test_documents_travel_with_orders_and_nobody_changes_one() -> None:
    signed = sign_orders(KEY, TOLD)
    assert read_orders(signed, KEY.public) == TOLD
    changed = SignedOrders(signed.payload.replace(b"what", b"that"), signed.signature)
    assert read_orders(changed, KEY.public) is None


def test_orders_of_the_release_before_have_no_documents() -> None:
    assert read_orders(signed_anyhow(msgspec.msgpack.encode([7, ["a" * 16], {}])), KEY.public) == Orders(7, ("a" * 16,))


@pytest.mark.parametrize("documents", [{str(n): b"" for n in range(17)}, {"a": bytes((1 << 16) + 1)}, {"": b""}])
def test_documents_are_few_and_small(documents: dict[str, bytes]) -> None:
    payload = msgspec.msgpack.encode([8, [], {}, documents])
    assert read_orders(signed_anyhow(payload), KEY.public) is None
