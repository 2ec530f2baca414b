"""What a node shows of its token: as it is, or as the owner has renewed it; and when it is to go."""

from collections.abc import Iterable

import pytest

from p2pserve.bootstrap import JoinToken, Role, TokenError
from p2pserve.bootstrap.errors import TokenSpent
from p2pserve.bootstrap.members.admission import Admission
from p2pserve.bootstrap.members.own_certificate import OwnCertificate
from p2pserve.bootstrap.trust.orders import Orders, Renewal, sign_orders
from p2pserve.bootstrap.trust.tokens import admit_credential

from ..certificates import KEY, PEOPLE, admission

ME, OTHER = PEOPLE[0].peer_id, PEOPLE[1].peer_id
TOKEN = JoinToken.parse(KEY.issue((), Role.WORKER, 1000.0))
NAME = TOKEN.grant.certificate


def renewal(expires_at: float, peers: Iterable[str] = ()) -> Renewal:
    later = JoinToken.parse(KEY.issue((), Role.WORKER, expires_at, secret=TOKEN.secret))
    return Renewal(later.certificate, later.signature, tuple(peers))


def with_orders(found: Admission, number: int = 1, **orders: object) -> Admission:
    assert found.take_orders(sign_orders(KEY, Orders(number, **orders)))  # type: ignore[arg-type]
    return found


def test_one_that_has_ended_is_refused_here_unless_this_box_was_in_before() -> None:
    own = OwnCertificate(TOKEN, ME, admission())
    own.check(Role.WORKER, 999.0, has_joined=False)
    with pytest.raises(TokenError, match="expired 0 s ago"):
        own.check(Role.WORKER, 1000.0, has_joined=False)
    own.check(Role.WORKER, 1000.0, has_joined=True)


def test_one_of_another_role_or_network_is_refused_here() -> None:
    with pytest.raises(TokenError, match="for the role 'worker', not 'admin'; start as 'worker'"):
        OwnCertificate(TOKEN, ME, admission()).check(Role.ADMIN, 1.0, has_joined=True)
    with pytest.raises(TokenError, match="for another network"):
        OwnCertificate(TOKEN, ME, Admission(b"x" * 32)).check(Role.WORKER, 1.0, has_joined=True)


@pytest.mark.parametrize("has_joined", [False, True])
def test_one_that_was_revoked_is_refused_here_by_its_name(has_joined: bool) -> None:
    own = OwnCertificate(TOKEN, ME, with_orders(admission(), revoked=(NAME,)))
    with pytest.raises(TokenSpent, match=f"the join token {NAME} was revoked by the network's owner; ask"):
        own.check(Role.WORKER, 1.0, has_joined=has_joined)
    with pytest.raises(TokenSpent, match="revoked"):
        own.heed_orders()


@pytest.mark.parametrize(("peers", "counts"), [((), True), ((OTHER, ME), True), ((OTHER,), False)])
def test_a_later_certificate_is_shown_by_those_it_is_for(peers: tuple[str, ...], counts: bool) -> None:
    members = with_orders(admission(), renewed={NAME: renewal(2000.0, peers)})
    own = OwnCertificate(TOKEN, ME, members)
    assert own.heed_orders() is counts
    shown = admit_credential(own.credential(), ME, KEY.public, None)
    assert (shown.expires_at, shown.certificate) == (2000 if counts else 1000, NAME)
    assert not own.heed_orders(), "orders are heeded once"


def test_an_earlier_certificate_is_not_shown() -> None:
    members = with_orders(admission(), renewed={NAME: renewal(2000.0)})
    own = OwnCertificate(TOKEN, ME, members)
    assert own.heed_orders()
    with_orders(members, 2, renewed={NAME: renewal(1500.0)})
    assert not own.heed_orders()
    with_orders(members, 3, renewed={NAME: renewal(3000.0)})
    assert own.heed_orders()
