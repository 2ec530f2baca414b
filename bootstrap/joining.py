"""Getting in: asking the members that were named, and those remembered, until one lets this node in."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from .addresses import Address
from .errors import IdentityInUse, NetworkError, Refused, TokenError, Unreachable
from .members.neighbours import Contacts
from .sessions import PeerSessions
from .settings import NetworkSettings
from .trust.keys import PeerId
from .trust.tokens import Bootstrap

SAY_FIRST_S: Final = 3.0  # most that are away for a moment are back by then
SAY_EVERY_S: Final = 10.0

JoinOutcome = tuple[Bootstrap, NetworkError | None]  # None: this member has let us in


class Joining:
    """One node's way into its network.

    ``on_named`` hears who answers at an address that was given by hand; ``say`` is told now and then what is waited
    for, in a line for people."""

    def __init__(
        self,
        contacts: Contacts,
        sessions: PeerSessions,
        on_named: Callable[[PeerId, Address], None],
        say: Callable[[str], None],
        settings: NetworkSettings,
        rng: random.Random,
    ) -> None:
        self._contacts = contacts
        self._sessions = sessions
        self._on_named = on_named
        self._say = say
        self._settings = settings
        self._rng = rng

    def check_named(self, bootstraps: Sequence[Bootstrap], me: PeerId) -> None:
        """Refuse a token that names nobody but this node. Raises TokenError."""
        if bootstraps and not self._contacts.named:
            raise TokenError(
                f"the join token names only this node itself (..{me[-6:]}), as after that box was copied; "
                "delete identity.key in this node's home folder, and start it again: it makes its own"
            )

    async def run(self) -> None:
        """Return once a member has let us in. Raises Unreachable, Refused, IdentityInUse or TokenError when those that
        were named have refused, or the time is up."""
        send, receive = trio.open_memory_channel[JoinOutcome](float("inf"))
        named_failed = trio.Event()
        async with trio.open_nursery() as nursery:
            for member in self._contacts.named:
                nursery.start_soon(self._keep_asking, member, send)
            nursery.start_soon(self._ask_remembered, named_failed, send)
            failure = await self._wait_until_admitted(receive, named_failed)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _wait_until_admitted(
        self, outcomes: trio.MemoryReceiveChannel[JoinOutcome], named_failed: trio.Event
    ) -> NetworkError | None:
        """None as soon as a member lets us in; else why nobody does. Whom the user has named may say that there is no
        way in, and ends the waiting; a member that is only remembered may not."""
        named = dict.fromkeys(self._contacts.named).keys()
        failures: dict[Bootstrap, NetworkError] = {}
        ends_at = trio.current_time() + self._settings.join_s
        say_at = trio.current_time() + SAY_FIRST_S
        with trio.move_on_at(ends_at):
            async for member, error in outcomes:
                if error is None or (isinstance(error, IdentityInUse) and member in named):
                    return error
                failures[member] = error
                if not failures.keys() >= named:
                    continue  # who was named and has not answered yet may still let us in
                named_failed.set()
                refusals = [failures[each] for each in named if not isinstance(failures[each], Unreachable)]
                if refusals:
                    return refusals[0]
                if trio.current_time() >= say_at:
                    say_at = trio.current_time() + SAY_EVERY_S
                    left_s = ends_at - trio.current_time()
                    self._say(f"waiting for the network, for {left_s:.0f} s more: {self._describe_failure(failures)}")
        refusals = [each for each in failures.values() if not isinstance(each, Unreachable)]
        return refusals[0] if refusals else self._describe_failure(failures)

    def _describe_failure(self, failures: Mapping[Bootstrap, NetworkError]) -> NetworkError:
        silent = f"no answer within {self._settings.join_s:g} s; check the address and the firewall"
        reasons = [str(failures.get(each, f"{each}: {silent}")) for each in self._contacts.named]
        text = " | ".join(reasons)
        remembered = len(self._contacts.standby)
        if len(reasons) > 1 or remembered:
            beside = f", nor any of {remembered} members known from before" if remembered else ""
            text = f"none of {len(reasons)} bootstraps can be reached{beside}: {text}"
        return Unreachable(f"{text}; any other member lets in, too: --bootstrap TOKEN,HOST:PORT")

    async def _ask_remembered(self, named_failed: trio.Event, outcome: trio.MemorySendChannel[JoinOutcome]) -> None:
        """Ask the members of an earlier run, after those that the user named had their chance."""
        with trio.move_on_after(self._settings.head_start_s):
            await named_failed.wait()
        async with trio.open_nursery() as nursery:
            for member in self._contacts.standby:
                nursery.start_soon(self._keep_asking, member, outcome)

    async def _keep_asking(self, member: Bootstrap, outcome: trio.MemorySendChannel[JoinOutcome]) -> None:
        """Ask one member to let us in, until it does or refuses."""
        pause_s = self._settings.join_retry_s
        while True:
            try:
                peer = await self._sessions.find_peer(member)
                address = Address(member.host, member.port)
                if member in self._contacts.named:
                    self._on_named(peer, address)
                await self._sessions.connect(peer, address)
            except Unreachable as error:
                outcome.send_nowait((member, error))
            except (Refused, TokenError) as error:
                outcome.send_nowait((member, error))
                return
            else:
                outcome.send_nowait((member, None))
                return
            await trio.sleep(pause_s * self._rng.uniform(0.8, 1.2))
            pause_s = min(1.5 * pause_s, self._settings.named_backoff_s)
