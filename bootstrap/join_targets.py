"""What a join string says, and what is wrong with one that has no token."""

import trio

from .errors import Refused, Unreachable
from .trust.targets import JoinTarget, parse_join_target
from .trust.tokens import Bootstrap


async def read_join_target(bootstrap: str, token: str | None) -> tuple[str, tuple[Bootstrap, ...]]:
    """Read `--bootstrap` and `--token`: the token's text, and the members to ask, given ones first.
    Raises AddressError, TokenError, Unreachable, Refused."""
    target = parse_join_target(bootstrap, token)
    if target.token is None:
        await _probe_for_token(target)
        raise Refused(
            f"bootstrap {target.members[0]}: this network wants a token; give the one that `p2pserve bootstrap` printed"
            " beside the address: --bootstrap TOKEN,ADDR"
        )
    return target.token, target.members


async def _probe_for_token(target: JoinTarget) -> None:
    """Tell an address where nobody listens from one where a token is missing."""
    address = target.members[0]
    reason = "no answer within 5 s"
    try:
        with trio.move_on_after(5):
            stream = await trio.open_tcp_stream(address.host, address.port)
            await stream.aclose()
            return
    except OSError as error:
        reason = str(error)
    raise Unreachable(f"bootstrap {address}: cannot be reached ({reason}); check the address and that it is up")
