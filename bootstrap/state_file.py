"""What a node keeps of its network between runs: who its members are, the highest epoch, the owner's
orders, liars, and which peers have used which certificate.

    state = StateFile(home, network_key_public)
    Network(..., state=state)

With it a restarted node knows whom to dial, lets in members whose certificates have expired since
they joined, does not begin again at epoch 1, and does not forget what was revoked. The file is
replaced as a whole, and carries a checksum: one that is damaged is set aside, and the node starts
as one that has never been in this network.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import trio

from .members.states import NetworkState
from .trust.kept_file import KeptFile

_log = logging.getLogger(__name__)

SAVE_EVERY_S: Final = 10.0


class StateFile:
    """The file of one network in ``folder``. ``say`` is told what could not be read or written, in lines for people."""

    def __init__(self, folder: Path, network: bytes, say: Callable[[str], None] = _log.warning) -> None:
        self.path = folder / f"network-{network.hex()[:16]}.state"
        self._file = KeptFile(self.path, NetworkState, b"p2pserve-state-1\n", say)
        self._say = say

    def load(self) -> NetworkState | None:
        """What an earlier run has kept; None where there is none, or it is damaged."""
        try:
            return self._file.load()
        except OSError as error:
            self._say(f"{self.path} was not read: {error}; members of an earlier run are not known")
            return None

    def save(self, state: NetworkState) -> None:
        """Replace the file; a failure is told, and costs nothing else."""
        try:
            self._file.save(state)
        except OSError as error:
            self._say(f"{self.path} was not written: {error}; free some space, or mend its permissions")

    def __repr__(self) -> str:
        return f"StateFile({self.path})"


class KeepsState(Protocol):
    """What is asked of a network."""

    @property
    def revision(self) -> int:
        """Grows with every change."""
        ...

    async def wait_changed(self, revision: int) -> int:
        """Wait until it is another than this one."""
        ...

    def state(self) -> NetworkState:
        """What is to be kept."""
        ...


async def keep_state(network: KeepsState, file: StateFile) -> None:
    """Save what changes, at most every few seconds, and once more at the end."""
    saved: NetworkState | None = None
    revision = network.revision
    try:
        while True:
            state = network.state()
            if state != saved:
                # In a thread: a home folder may lie on a disk that takes its time, and this loop must answer pings.
                await trio.to_thread.run_sync(file.save, state)
                saved = state
            await trio.sleep(SAVE_EVERY_S)
            revision = await network.wait_changed(revision)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(file.save, network.state())
