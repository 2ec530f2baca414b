"""What shows the network, through a front: for whom a front lets it pass, and for whom a box answers it."""

import json

import pytest

from p2pserve.bootstrap import Role
from p2pserve.node.http.admission import FrontRules, judge

from .http_world import NO_HEADERS, echo, http_world, in_virtual_time

LOCAL = [(b"Host", b"127.0.0.1:8000")]
TOKEN = "0123456789abcdef"
SHOWN = (b"authorization", b"Bearer " + TOKEN.encode())
ADMINS = FrontRules(keys=("secret-1",), role=Role.ADMIN)
GUARDED = FrontRules(role=Role.ADMIN, admin_token=TOKEN)


@pytest.mark.parametrize(
    ("rules", "host", "headers", "status"),
    [
        (ADMINS, "127.0.0.1", LOCAL, None),  # an API key is neither asked for nor enough
        (ADMINS, "203.0.113.9", [*LOCAL, (b"x-api-key", b"secret-1")], 403),
        (ADMINS, None, LOCAL, 403),
        (ADMINS, "127.0.0.1", [(b"host", b"evil.example")], 403),
        (ADMINS, "127.0.0.1", [*LOCAL, (b"X-Forwarded-For", b"203.0.113.9")], 403),
        (ADMINS, "127.0.0.1", [*LOCAL, (b"Origin", b"https://evil.example")], 403),
        (FrontRules(role=Role.ADMIN, needs_no_key=True), "203.0.113.9", [(b"host", b"box.example")], 403),
        (GUARDED, "203.0.113.9", [(b"host", b"box.example"), SHOWN], None),
        (GUARDED, "127.0.0.1", LOCAL, 401),
        (GUARDED, "127.0.0.1", [*LOCAL, (b"authorization", b"Bearer wrong")], 401),
        (FrontRules(role=Role.CLIENT, admin_token=TOKEN), "127.0.0.1", [*LOCAL, SHOWN], 403),
        (FrontRules(role=Role.WORKER), "127.0.0.1", LOCAL, 403),
    ],
)
def test_who_may_look_through_a_front(
    rules: FrontRules, host: str | None, headers: list[tuple[bytes, bytes]], status: int | None
) -> None:
    for target in ("/p2p/v1/nodes", "/dashboard/news/"):
        refusal = judge("GET", target, [*headers, (b"x-have", b"")], rules, host)
        assert (refusal.status if refusal is not None else None) == status


def test_who_may_not_look_is_told_what_to_do() -> None:
    texts = [judge("GET", "/dashboard", LOCAL, rules) for rules in (FrontRules(), ADMINS, GUARDED)]
    fixes = ("p2pserve token create --role admin", "--admin-token", "Authorization: Bearer")
    for refusal, fix in zip(texts, fixes, strict=True):
        assert refusal is not None
        assert fix in refusal.text
    refusal = judge("TRACE", "/dashboard", [*LOCAL, SHOWN], GUARDED)
    assert refusal is not None
    assert refusal.status == 405


@pytest.mark.parametrize("role", [Role.ADMIN, Role.CLIENT])  # as `bootstrap --http` is in the network, and a gateway
def test_an_admins_front_lets_in_who_shows_the_token_and_the_box_is_told(role: Role) -> None:
    async def main() -> None:
        async with http_world(echo, rules=GUARDED, role=role, token_role=Role.ADMIN) as world:
            assert world.client.asks_as is Role.ADMIN
            browser = world.connect()
            for shown in (NO_HEADERS, {"authorization": "Bearer another-token-"}):
                told = await browser.ask("GET", "/p2p/v1/nodes", headers={**shown, "x-p2p-role": "admin"})
                assert (told.status, told.headers["www-authenticate"], world.boxes[0].seen) == (401, "Bearer", [])
            told = await browser.ask("GET", "/p2p/v1/nodes", headers={"authorization": f"Bearer {TOKEN}"})
            assert told.status == 200
            (seen,) = world.boxes[0].seen
            assert (seen.headers["host"], seen.headers["x-p2p-role"]) == ("localhost:8000", "admin")
            assert "authorization" not in seen.headers  # boxes are rented: the token is no business of theirs

    in_virtual_time(main)


@pytest.mark.parametrize("role", [Role.CLIENT, Role.WORKER])
def test_a_box_refuses_admin_paths_whatever_the_front_lets_pass(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with http_world(echo, role=role) as world:
            told = await world.connect().ask("GET", "/p2p/v1/nodes")
            assert told.status == 403
            monkeypatch.setattr("p2pserve.node.http.front.judge", lambda *_: None)
            told = await world.connect().ask("GET", "/p2p/v1/nodes")
            assert (told.status, world.boxes[0].seen) == (403, [])
            assert "is for admins" in json.loads(told.body)["error"]["message"]
            assert (await world.connect().ask("GET", "/etc/passwd")).status == 404
            assert world.boxes[0].seen == []

    in_virtual_time(main)
