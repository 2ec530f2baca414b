"""The catalogue of tokens: what may be issued, revoked and renewed, and who is renewed without being asked."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import Bootstrap, Identity, JoinToken, NetworkKey, Role, TokenError
from p2pserve.bootstrap.trust import catalogue as catalogues
from p2pserve.bootstrap.trust.catalogue import OWN, Catalogue, Issued, Wish
from p2pserve.bootstrap.trust.orders import MAX_REVOKED, Orders

KEY = NetworkKey(b"k" * 32)
HERE = Bootstrap("203.0.113.7", 4001, Identity(b"p" * 32).peer_id)
THERE = Bootstrap("203.0.113.8", 4001)  # whoever answers there
NOW = 1_000.0
LIFE_S = 900.0  # members are renewed in the last third


def one(catalogue: Catalogue | None = None, greets_as: str = "", **wish: object) -> tuple[Catalogue, Issued]:
    wished = msgspec.convert({"expires_at": NOW + LIFE_S, **wish}, Wish)
    return catalogues.issue(KEY, catalogue or Catalogue(), wished, (HERE, THERE), NOW, greets_as=greets_as)


def test_a_token_is_what_was_wished_for() -> None:
    catalogue, token = one(role="worker", lead=True, uses=3, name="rented", renews=False)
    parsed = JoinToken.parse(token.text)
    assert (parsed.role, parsed.grant.lead, parsed.grant.uses, parsed.bootstraps) == (
        Role.WORKER,
        True,
        3,
        (HERE, THERE),
    )
    assert catalogue.issued == (token,)
    assert (token.id, token.name, token.renews) == (parsed.grant.certificate, "rented", False)
    assert catalogue.orders.number == 0, "there is nothing to tell anybody"


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"expires_at": NOW}, "expires: "),
        ({"uses": 0}, "uses: 0 boxes"),
        ({"uses": 4097}, "uses: 4097 boxes"),
        ({"role": "client", "lead": True}, "lead: a client"),
        ({"name": "x" * 65}, "name: "),
        ({"name": "two\nlines"}, "name: "),
    ],
)
def test_a_wish_that_cannot_be_is_told_by_its_field(wish: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokenError, match=reason):
        one(**wish)


def test_a_token_is_found_by_the_beginning_of_its_id() -> None:
    catalogue, token = one()
    assert catalogues.find_issued(catalogue, token.id[:4].upper()) == token
    for text, reason in (("", "too short"), (token.id[:3], "too short"), ("zzzz", "no token 'zzzz' was issued here")):
        with pytest.raises(TokenError, match=f"^id: .*{reason}"):
            catalogues.find_issued(catalogue, text)
    twice = msgspec.structs.replace(catalogue, issued=(token, token))
    with pytest.raises(TokenError, match="begins 2 tokens"):
        catalogues.find_issued(twice, token.id)


def test_what_a_token_is_good_for() -> None:
    catalogue, token = one(uses=2)
    ends = float(token.grant.expires_at)
    states = [catalogues.describe_state(catalogue, token, seen, now) for seen, now in ((0, NOW), (1, ends - 1))]
    assert states == ["valid", "valid"]
    assert catalogues.describe_state(catalogue, token, 2, NOW) == "used up"
    assert catalogues.describe_state(catalogue, token, 2, ends) == "expired"
    revoked, _ = catalogues.revoke(catalogue, token.id)
    assert catalogues.describe_state(revoked, token, 0, NOW) == "revoked"


def test_what_is_shown_at_the_start_is_the_last_that_still_lets_in() -> None:
    catalogue, first = one(greets_as="worker", uses=1)
    catalogue, second = one(catalogue, greets_as="worker")
    catalogue, _ = one(catalogue, greets_as="client", role="client")
    assert catalogues.find_greeting(catalogue, "worker", {}, NOW) == second
    assert catalogues.find_greeting(catalogue, "worker", {second.id: 256}, NOW) == first
    assert catalogues.find_greeting(catalogue, "worker", {}, NOW + LIFE_S) is None
    assert catalogues.find_greeting(catalogue, "leader", {}, NOW) is None


def test_a_token_may_name_other_members_and_stays_the_same() -> None:
    catalogue, token = one()
    moved, changed = catalogues.rename_members(KEY, catalogue, token, (THERE,))
    assert (changed.id, changed.grant) == (token.id, token.grant)
    assert JoinToken.parse(changed.text).bootstraps == (THERE,)
    assert moved.issued == (changed,)
    assert catalogues.rename_members(KEY, moved, changed, (THERE,)) == (moved, changed)


def test_revoking_is_an_order_and_is_given_once() -> None:
    catalogue, token = one()
    catalogue, _ = catalogues.renew(KEY, catalogue, token.id, NOW + 5000, (HERE,), NOW)
    revoked, _ = catalogues.revoke(catalogue, token.id)
    assert revoked.orders == Orders(catalogue.orders.number + 1, (token.id,), {})
    assert catalogues.revoke(revoked, token.id)[0] is revoked
    with pytest.raises(TokenError, match="was revoked, which is for good"):
        catalogues.renew(KEY, revoked, token.id, NOW + 5000, (HERE,), NOW)


def test_the_owners_own_certificate_is_not_revoked_and_the_list_has_an_end() -> None:
    catalogue, own = one(greets_as=OWN, role="admin")
    with pytest.raises(TokenError, match="of this very box; stop its node"):
        catalogues.revoke(catalogue, own.id)
    catalogue, token = one()
    full = msgspec.structs.replace(catalogue, orders=Orders(1, ("0" * 16,) * MAX_REVOKED))
    with pytest.raises(TokenError, match="no more can be"):
        catalogues.revoke(full, token.id)


def test_a_renewed_token_lets_others_in_too_and_has_the_same_name() -> None:
    catalogue, token = one()
    renewed, changed = catalogues.renew(KEY, catalogue, token.id, NOW + 5000, (THERE,), NOW + 950)
    assert changed.id == token.id
    assert JoinToken.parse(changed.text).grant.expires_at == NOW + 5000
    order = renewed.orders.renewed[token.id]
    assert order.peers == ()
    assert JoinToken.parse(token.text).renewed(order.certificate, order.signature).grant == changed.grant
    assert catalogues.find_members_end(renewed, changed) == NOW + 5000
    with pytest.raises(TokenError, match="expires: "):
        catalogues.renew(KEY, catalogue, token.id, NOW, (), NOW)


# -- members that are renewed without being asked ---------------------------------------------------------------------


def renew_members(catalogue: Catalogue, token: Issued, now: float, *peers: str) -> Catalogue:
    return catalogues.renew_members(KEY, catalogue, {token.id: peers}, now)


def test_members_are_renewed_in_the_last_third_and_for_as_long_again() -> None:
    catalogue, token = one()
    assert renew_members(catalogue, token, NOW + 599, "a") is catalogue
    renewed = renew_members(catalogue, token, NOW + 600, "b", "a")
    assert renewed.orders.renewed[token.id].peers == ("a", "b")
    assert renewed.issued == catalogue.issued, "the token's own end stays"
    assert catalogues.find_members_end(renewed, token) == NOW + 2 * LIFE_S
    assert renew_members(renewed, token, NOW + 700, "a", "b") is renewed


def test_the_margin_of_a_long_life_is_a_day() -> None:
    catalogue, token = one(expires_at=NOW + 30 * 86400)
    assert renew_members(catalogue, token, NOW + 29 * 86400 - 1, "a") is catalogue
    assert renew_members(catalogue, token, NOW + 29 * 86400, "a") is not catalogue


def test_who_joins_late_is_added_and_who_is_away_is_kept_until_the_next_time() -> None:
    catalogue, token = one()
    first = renew_members(catalogue, token, NOW + 600, "a")
    second = renew_members(first, token, NOW + 700, "b")
    assert second.orders.renewed[token.id].peers == ("a", "b")
    assert catalogues.find_members_end(second, token) == NOW + 2 * LIFE_S
    third = renew_members(second, token, NOW + 1500, "b")
    assert third.orders.renewed[token.id].peers == ("b",), "who was away at the end of its time is no member any more"


def test_after_a_long_pause_the_time_counts_from_now() -> None:
    catalogue, token = one()
    late = renew_members(catalogue, token, NOW + 50_000, "a")
    assert catalogues.find_members_end(late, token) == NOW + 50_000 + LIFE_S


@pytest.mark.parametrize("why", ["nobody", "no renewal", "revoked", "open"])
def test_who_is_not_renewed(why: str) -> None:
    catalogue, token = one(renews=why != "no renewal")
    if why == "revoked":
        catalogue, _ = catalogues.revoke(catalogue, token.id)
    if why == "open":
        catalogue, _ = catalogues.renew(KEY, catalogue, token.id, NOW + 9000, (), NOW)
    assert renew_members(catalogue, token, NOW + 800, *(() if why == "nobody" else ("a",))) is catalogue


def test_renewals_that_have_ended_are_not_told_any_more() -> None:
    catalogue, token = one()
    catalogue, other = one(catalogue, expires_at=NOW + 90_000)
    catalogue = renew_members(catalogue, token, NOW + 600, "a")
    catalogue = renew_members(catalogue, other, NOW + 80_000, "b")
    assert catalogue.orders.renewed.keys() == {other.id}


# -- what was lost ----------------------------------------------------------------------------------------------------


def test_a_catalogue_that_was_lost_learns_from_the_network_what_was_ordered() -> None:
    _, token = one()
    heard = Orders(5, (token.id,), {})
    assert catalogues.absorb(Catalogue(), heard).orders == heard
    other = one()[1].id
    mine = msgspec.structs.replace(Catalogue(), orders=Orders(5, (other,), {}))
    merged = catalogues.absorb(mine, heard).orders
    assert (merged.number, set(merged.revoked)) == (6, {token.id, other})


def test_older_orders_teach_nothing() -> None:
    catalogue = msgspec.structs.replace(Catalogue(), orders=Orders(5, ("0" * 16,), {}))
    assert catalogues.absorb(catalogue, Orders(4)) is catalogue
    assert catalogues.absorb(catalogue, catalogue.orders) is catalogue


def test_members_of_a_token_that_was_renewed_by_hand_are_renewed_by_its_new_life() -> None:
    catalogue, token = one()
    catalogue, token = catalogues.renew(KEY, catalogue, token.id, NOW + 100_000 + 300, (), NOW + 100_000)
    renewed = renew_members(catalogue, token, NOW + 100_000 + 250, "a")
    assert catalogues.find_members_end(renewed, token) == NOW + 100_000 + 600


# -- documents --------------------------------------------------------------------------------------------------------


def test_a_document_is_one_more_order_and_stays_whatever_is_ordered_after_it() -> None:
    catalogue, token = one()
    catalogue = catalogues.write_document(catalogue, "services", b"first")
    catalogue, _ = catalogues.revoke(catalogue, token.id)
    assert (catalogue.orders.number, catalogue.orders.revoked) == (2, (token.id,))
    assert catalogue.orders.documents == {"services": b"first"}
    again = catalogues.write_document(catalogue, "services", b"second")
    assert (again.orders.number, again.orders.revoked) == (3, (token.id,))
    assert again.orders.documents == {"services": b"second"}


def test_after_a_catalogue_was_lost_the_networks_later_document_counts_and_an_earlier_one_never() -> None:
    heard = Orders(5, documents={"services": b"later"})
    lost, _ = one()
    assert catalogues.absorb(lost, heard).orders.documents == {"services": b"later"}
    newer = catalogues.write_document(msgspec.structs.replace(lost, orders=heard), "services", b"newest")
    assert catalogues.absorb(newer, heard) is newer
    # An old copy of the owner's files wrote under a number that the network has seen already: both are of that number.
    copied = msgspec.structs.replace(lost, orders=Orders(5, documents={"services": b"here"}))
    merged = catalogues.absorb(copied, heard)
    assert (merged.orders.number, merged.orders.documents) == (6, {"services": b"here"})
