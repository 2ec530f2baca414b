"""Permission to have bytes forwarded: what may be asked for, and the relay's books."""

from __future__ import annotations

import pytest

from p2pserve.kvtransport.errors import RelayRefused, TicketError
from p2pserve.kvtransport.wire.permits import Permit, Refusal, RelayLedger, pack_relay_hello


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
