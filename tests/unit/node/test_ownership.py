"""The box with a network's key: which tokens it makes and prints, and what they name."""

from pathlib import Path

import msgspec
import pytest

from p2pserve.bootstrap import Bootstrap, Identity, JoinToken, NetworkKey, Role, TokenError
from p2pserve.bootstrap.address_book import AddressBook
from p2pserve.bootstrap.members.states import NetworkState
from p2pserve.bootstrap.state_file import StateFile
from p2pserve.bootstrap.trust.catalogue import Wish
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry
from p2pserve.bootstrap.trust.orders import sign_orders
from p2pserve.node.box.errors import NodeError
from p2pserve.node.joining import new_network
from p2pserve.node.ownership import GREETINGS, MAX_NAMED, Ownership

NOW = 1e9
HERE = Bootstrap("203.0.113.7", 4001, Identity(b"p" * 32).peer_id)
ALSO = (Bootstrap("198.51.100.1", 4001), Bootstrap("198.51.100.2", 4001))
PEOPLE = [Identity(bytes([seed]) * 32) for seed in range(1, 13)]


@pytest.fixture
def owner(tmp_path: Path) -> Ownership:
    return Ownership(tmp_path, NetworkKey.load_or_create(tmp_path), pytest.fail)


def started(owner: Ownership, also: tuple[Bootstrap, ...] = ()) -> dict[str, str]:
    return owner.take_greetings(HERE, also, NOW)


def record(owner: Ownership, who: Identity, *, lead: bool = True, left: bool = False) -> Entry:
    token = JoinToken.parse(owner.key.issue((), Role.WORKER, NOW + 1, lead=lead))
    shown = MemberRecord(Role.WORKER, "192.0.2.1", 4000, token.credential(who.peer_id), left)
    return sign_entry(who, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(shown))


def remember(owner: Ownership, *entries: Entry, **more: object) -> None:
    """What the node of this box leaves on disk."""
    book = AddressBook(owner.home, owner.key.public)
    book.save(Bootstrap("192.0.2.1", 4000, who.peer_id) for who in PEOPLE)
    StateFile(owner.home, owner.key.public).save(NetworkState(entries=entries, **more))  # type: ignore[arg-type]


def test_only_the_box_with_the_key_makes_tokens(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"^home: .* run this on the box that ran `p2pserve bootstrap`"):
        Ownership.open(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    key = new_network(tmp_path, pytest.fail).network
    assert Ownership.open(tmp_path).key.public == key


def test_a_network_that_was_never_started_has_no_address_to_name(owner: Ownership) -> None:
    with pytest.raises(TokenError, match="was never started"):
        owner.create(Wish(expires_at=NOW + 9), NOW)


def test_what_is_printed_leads_serves_or_asks_and_is_the_same_at_the_next_start(owner: Ownership) -> None:
    tokens = started(owner)
    assert tokens.keys() == GREETINGS.keys() == {"leader", "worker", "client", "admin"}
    grants = {word: JoinToken.parse(text).grant for word, text in tokens.items()}
    assert {word: (grant.role, grant.lead) for word, grant in grants.items()} == GREETINGS
    assert started(owner) == tokens
    assert len(owner.read().issued) == len(GREETINGS)


def test_tokens_that_were_revoked_used_up_or_have_ended_are_replaced(owner: Ownership) -> None:
    first = started(owner)
    names = {word: JoinToken.parse(text).grant.certificate for word, text in first.items()}
    owner.revoke(names["leader"])
    remember(owner, holders={names["worker"]: [f"{n}" for n in range(256)], names["client"]: ["one"]})
    second = started(owner)
    assert {word for word in first if first[word] != second[word]} == {"leader", "worker"}
    end = JoinToken.parse(first["client"]).grant.expires_at
    third = owner.take_greetings(HERE, (), float(end))
    assert not set(second.values()) & set(third.values())
    assert all(JoinToken.parse(text).grant.expires_at > end for text in third.values())


def test_a_token_names_this_box_the_others_that_were_given_and_members_that_may_lead(owner: Ownership) -> None:
    started(owner, ALSO)
    led, served, left, *rest = PEOPLE
    remember(owner, record(owner, led), record(owner, served, lead=False), record(owner, left, left=True))
    token = owner.create(Wish(expires_at=NOW + 9), NOW)
    assert JoinToken.parse(token.text).bootstraps == (HERE, *ALSO, Bootstrap("192.0.2.1", 4000, led.peer_id))
    remember(owner, *(record(owner, each) for each in rest))
    again = owner.renew(token.id, NOW + 99, NOW)
    assert len(JoinToken.parse(again.text).bootstraps) == MAX_NAMED
    assert len(again.text) < 2000
    moved = Bootstrap("203.0.113.9", 4009, HERE.peer_id)
    shown = JoinToken.parse(owner.take_greetings(moved, (), NOW)["worker"])
    assert shown.bootstraps[0] == moved, "tokens that were made at an earlier address name the new one"


def test_this_box_has_a_certificate_of_its_own_until_it_ends(owner: Ownership) -> None:
    text = owner.take_own_token(NOW)
    token = JoinToken.parse(text)
    assert (token.role, token.grant.lead) == (Role.ADMIN, True)
    assert owner.take_own_token(NOW + 1) == text
    assert owner.take_own_token(float(token.grant.expires_at)) != text
    with pytest.raises(TokenError, match="of this very box"):
        owner.revoke(token.grant.certificate)


def test_a_damaged_catalogue_is_set_aside_and_what_was_revoked_stays_so(tmp_path: Path) -> None:
    said: list[str] = []
    owner = Ownership(tmp_path, NetworkKey.load_or_create(tmp_path), said.append)
    started(owner)
    token = owner.create(Wish(expires_at=NOW + 9), NOW)
    owner.revoke(token.id)
    remember(owner, orders=sign_orders(owner.key, owner.read().orders))
    (path,) = tmp_path.glob("*.catalogue")
    path.write_bytes(b"nonsense")
    assert owner.read().orders.revoked == (token.id,)
    assert len(said) == 1
    assert "damaged" in said[0]
    other = JoinToken.parse(started(owner)["worker"]).grant.certificate
    owner.revoke(other)
    orders = owner.read().orders
    assert (orders.number, orders.revoked) == (2, (token.id, other))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    owner = Ownership(tmp_path / "file", NetworkKey(b"k" * 32), pytest.fail)
    with pytest.raises(NodeError, match=r"^home .*cannot be used"):
        owner.read()
