"""Permission to have bytes forwarded: what may be asked for, and the relay's books."""

from __future__ import annotations

import pytest

from p2pserve.kvtransport.errors import RelayRefused, TicketError
from p2pserve.kvtransport.wire.permits import Permit, Refusal, RelayLedger, pack_relay_answer, pack_relay_hello


def permit(**changed: object) -> Permit:
    values: dict[str, object] = {
        "permit": b"p" * 16,
        "secret": b"s" * 32,
        "next_host": "10.0.0.2",
        "next_port": 7000,
        "byte_budget": 1000,
        "bytes_per_s": 100.0,
        "expires_at": 50.0,
    }
    return Permit(**(values | changed))  # type: ignore[arg-type]


def refusal(ledger: RelayLedger, hello: bytes, now: float) -> Refusal:
    with pytest.raises(RelayRefused) as caught:
        ledger.enter(hello, now)
    return Refusal(caught.value.code)


def test_the_ledger_knows_its_permits_and_nobody_elses() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    hello = pack_relay_hello(permit(), b"1" * 16)
    assert ledger.enter(hello, 1.0) == permit()
    assert refusal(ledger, hello, 1.0) == Refusal.FORGED, "a nonce serves once"
    assert refusal(ledger, pack_relay_hello(permit(secret=b"x" * 32), b"2" * 16), 1.0) == Refusal.FORGED
    assert refusal(ledger, pack_relay_hello(permit(permit=b"x" * 16), b"3" * 16), 1.0) == Refusal.UNKNOWN
    assert refusal(ledger, b"GET / HTTP/1.1", 1.0) == Refusal.FORGED
    assert refusal(ledger, pack_relay_hello(permit(), b"4" * 16), 50.0) == Refusal.EXPIRED
    assert ledger.statistics()[0].connections == 1
    ledger.enter(pack_relay_hello(permit(), b"5" * 16), 2.0)
    assert ledger.statistics()[0].connections == 2
    ledger.leave(permit().permit)
    ledger.leave(b"x" * 16)
    assert ledger.statistics()[0].connections == 1
    assert ledger.strangers == 2


def test_the_ledger_holds_a_rate_and_a_budget() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    ledger.enter(pack_relay_hello(permit(), b"1" * 16), 0.0)
    waits, now = 0.0, 0.0
    for _ in range(10):
        wait = ledger.spend(permit().permit, 100, now)
        waits += wait
        now += wait
    assert waits == pytest.approx(1000 / 100, rel=0.01), "1000 bytes at 100 B/s, less the burst"
    with pytest.raises(RelayRefused, match="budget of 1000"):
        ledger.spend(permit().permit, 1, now)
    assert refusal(ledger, pack_relay_hello(permit(), b"2" * 16), now) == Refusal.SPENT
    ledger.admit(permit(byte_budget=2000), now)
    ledger.enter(pack_relay_hello(permit(), b"3" * 16), now)
    ledger.spend(permit().permit, 100, now)
    ledger.revoke(permit().permit)
    with pytest.raises(RelayRefused, match="revoked"):
        ledger.spend(permit().permit, 100, now)


@pytest.mark.parametrize(
    "changed",
    [
        *({"permit": b"p" * size} for size in (0, 15, 17)),
        *({"secret": b"s" * size} for size in (0, 31, 33)),
        *({"next_host": host} for host in ("", "h" * 256, "h\n")),
        *({"next_port": port} for port in (-1, 0, 65536)),
        *({"byte_budget": size} for size in (-1, 0)),
        *({"bytes_per_s": rate} for rate in (-1.0, 0.0, float("nan"))),
        *({"expires_at": at} for at in (float("inf"), float("nan"))),
    ],
)
def test_permits_that_permit_nothing(changed: dict[str, object]) -> None:
    with pytest.raises(TicketError):
        permit(**changed)
    assert "s" * 32 not in repr(permit())


@pytest.mark.parametrize(
    "changed",
    [{"next_host": "h"}, {"next_host": "h" * 255}, {"next_port": 1}, {"next_port": 65535}, {"byte_budget": 1}],
)
def test_permits_that_permit_hardly_anything_or_very_much(changed: dict[str, object]) -> None:
    made = permit(**changed)
    assert {name: getattr(made, name) for name in changed} == changed


def hello_of(number: int, one: Permit | None = None) -> bytes:
    """With a nonce of its own."""
    return pack_relay_hello(one or permit(), number.to_bytes(16, "big"))


def test_a_permit_that_is_admitted_again_keeps_its_books_and_its_secret() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    ledger.enter(hello_of(1), 0.0)
    ledger.spend(permit().permit, 600, 0.0)
    ledger.admit(permit(byte_budget=1100), 1.0)
    with pytest.raises(TicketError, match="known with another secret"):
        ledger.admit(permit(secret=b"x" * 32), 1.0)
    ledger.spend(permit().permit, 500, 1.0)
    (use,) = ledger.statistics()
    assert (use.connections, use.bytes_forwarded, use.byte_budget, use.refused) == (1, 1100, 1100, 0)


def test_a_permit_ends_at_its_moment_and_is_forgotten_once_it_is_unused() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    ledger.enter(hello_of(1), 49.9)
    ledger.spend(permit().permit, 1, 49.9)
    with pytest.raises(RelayRefused, match="has expired"):
        ledger.spend(permit().permit, 1, 50.0)
    other = permit(permit=b"o" * 16, expires_at=90.0)
    ledger.admit(other, 50.0)
    assert [use.permit for use in ledger.statistics()] == [b"p" * 16, b"o" * 16], "a connection is still there"
    ledger.leave(permit().permit)
    ledger.admit(other, 49.9)
    assert len(ledger.statistics()) == 2
    ledger.admit(other, 50.0)
    assert [use.permit for use in ledger.statistics()] == [b"o" * 16]


def test_the_rate_is_waited_for_to_the_byte() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)  # 100 B/s, of which 5 may come at once
    assert ledger.spend(permit().permit, 5, 0.0) == 0.0
    assert ledger.spend(permit().permit, 10, 0.0) == pytest.approx(0.1)
    assert ledger.spend(permit().permit, 10, 0.05) == pytest.approx(0.15), "5 of the 10 have come meanwhile"
    assert ledger.spend(permit().permit, 10, 40.0) == pytest.approx(0.05), "no more is saved up than 5"
    assert ledger.spend(permit().permit, 10, 39.0) == pytest.approx(0.15), "a clock that goes back gives nothing"


def test_what_does_not_fit_the_budget_closes_it_until_it_grows() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    ledger.spend(permit().permit, 999, 0.0)
    ledger.enter(hello_of(1), 0.0)
    with pytest.raises(RelayRefused, match="budget of 1000 bytes is spent"):
        ledger.spend(permit().permit, 2, 0.0)
    assert refusal(ledger, hello_of(2), 0.0) == Refusal.SPENT
    assert [use.refused for use in ledger.statistics()] == [1]
    ledger.admit(permit(byte_budget=1001), 0.0)
    ledger.enter(hello_of(3), 0.0)
    ledger.spend(permit().permit, 2, 0.0)


def test_connections_and_hellos_of_a_permit_are_bounded() -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    for number in range(64):
        ledger.enter(hello_of(number), 0.0)
    assert refusal(ledger, hello_of(64), 0.0) == Refusal.BUSY
    for number in range(65, 4096):
        ledger.leave(permit().permit)
        ledger.enter(hello_of(number), 0.0)
    ledger.leave(permit().permit)
    assert refusal(ledger, hello_of(4096), 0.0) == Refusal.BUSY, "each remembers its nonce"


@pytest.mark.parametrize("wrong", [hello_of(1)[:-1], hello_of(1) + b"x", b"x" + hello_of(1)[1:]])
def test_what_is_no_hello_is_a_strangers(wrong: bytes) -> None:
    ledger = RelayLedger()
    ledger.admit(permit(), 0.0)
    assert refusal(ledger, wrong, 0.0) == Refusal.FORGED
    assert (ledger.strangers, ledger.statistics()[0].refused) == (1, 0)


def test_an_answer_is_cut_to_what_its_length_can_say() -> None:
    assert pack_relay_answer(Refusal.SPENT, "no") == b"\x04\x02no"
    assert pack_relay_answer(Refusal.BUSY, "x" * 300) == b"\x05\xff" + b"x" * 255
