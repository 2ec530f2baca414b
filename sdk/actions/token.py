"""What `p2pserve token` does, on the box that holds a network's key."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from ...bootstrap import Role
from ...bootstrap.trust.catalogue import OWN, Catalogue, Issued, Wish, describe_state, find_members_end
from ...bootstrap.trust.tokens import DEFAULT_USES
from ...node.box.home import running_pid
from ...node.ownership import Ownership
from ..printing import printable

_USED_BY: Final = {
    Role.WORKER: "join --bootstrap {}",
    Role.CLIENT: 'generate --bootstrap {} "def fibonacci(n):"',
    Role.ADMIN: "gateway --bootstrap {}",
}


def create(arguments: SimpleNamespace) -> int:
    """`p2pserve token create`."""
    now = time.time()
    wish = Wish(
        role=Role(arguments.role),
        expires_at=now + arguments.expires,
        lead=arguments.lead,
        uses=DEFAULT_USES if arguments.uses is None else arguments.uses,
        name=arguments.name,
        renews=not arguments.no_renew,
    )
    token = _owner(arguments).create(wish, now)
    if arguments.format == "json":
        print(json.dumps({"id": token.id, "token": token.text, "expires_at": token.grant.expires_at}))
        return 0
    print(f"token {token.id}, {_describe_use(token)}, until {_date(token.grant.expires_at)}")
    _print_line(token)
    return 0


def show(arguments: SimpleNamespace) -> int:
    """`p2pserve token list`."""
    owner, now = _owner(arguments), time.time()
    catalogue, seen = owner.read(), owner.seen()
    rows = [_row(catalogue, each, seen.get(each.id, 0), now) for each in catalogue.issued if each.greets_as != OWN]
    if arguments.format == "json":
        print(json.dumps({"tokens": rows}))
        return 0
    form = "{:<17}{:<7}{:<5}{:>7} {:<8}{:<17}{}"
    print(form.format("id", "role", "lead", "used", "state", "until (UTC)", "name"))
    for row in rows:
        lead, used = "yes" if row["lead"] else "no", f"{row['seen']}/{row['uses']}"
        until = _date(int(str(row["expires_at"]))).removesuffix(" UTC")
        print(
            form.format(row["id"], row["role"], lead, used, row["state"], until, printable(str(row["name"]))).rstrip()
        )
    return 0


def revoke(arguments: SimpleNamespace) -> int:
    """`p2pserve token revoke`."""
    owner = _owner(arguments)
    token = owner.revoke(arguments.id)
    _report(arguments, token, f"token {token.id} is revoked: who has joined with it is hung up on, and refused")
    return 0


def renew(arguments: SimpleNamespace) -> int:
    """`p2pserve token renew`."""
    now = time.time()
    token = _owner(arguments).renew(arguments.id, now + arguments.expires, now)
    _report(
        arguments, token, f"token {token.id} is good until {_date(token.grant.expires_at)}; its boxes go on with it"
    )
    if arguments.format != "json":
        _print_line(token)
    return 0


TOKEN_COMMANDS: Final[dict[str, Callable[[SimpleNamespace], int]]] = {
    "create": create,
    "list": show,
    "revoke": revoke,
    "renew": renew,
}


def _owner(arguments: SimpleNamespace) -> Ownership:
    return Ownership.open(_home(arguments), lambda text: print(printable(text), file=sys.stderr))


def _home(arguments: SimpleNamespace) -> Path:
    home: Path = arguments.home.expanduser() / "bootstrap"
    return home


def _row(catalogue: Catalogue, token: Issued, seen: int, now: float) -> dict[str, object]:
    grant = token.grant
    return {
        "id": token.id,
        "name": token.name,
        "role": grant.role.value,
        "lead": grant.lead,
        "uses": grant.uses,
        "seen": seen,
        "state": describe_state(catalogue, token, seen, now),
        "created_at": int(token.created_at),
        "expires_at": grant.expires_at,
        "members_until": find_members_end(catalogue, token),
        "renews": token.renews,
    }


def _report(arguments: SimpleNamespace, token: Issued, line: str) -> None:
    is_running = running_pid(_home(arguments)) is not None
    if arguments.format == "json":
        told = {
            "id": token.id,
            "token": token.text,
            "expires_at": token.grant.expires_at,
            "node_is_running": is_running,
        }
        print(json.dumps(told))
        return
    print(line)
    if not is_running:
        print("the node of this box does not run: members hear of it once `p2pserve bootstrap` runs again")


def _describe_use(token: Issued) -> str:
    grant = token.grant
    if grant.role is not Role.WORKER:
        role = grant.role.value
        return f"for {grant.uses} {role}s at a time" if grant.uses > 1 else f"for one {role} at a time"
    boxes = "one box" if grant.uses == 1 else f"{grant.uses} boxes"
    return f"for {boxes} that may lead" if grant.lead else f"for {boxes}"


def _print_line(token: Issued) -> None:
    print(f"p2pserve {_USED_BY[token.grant.role].format(token.text)}")


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
