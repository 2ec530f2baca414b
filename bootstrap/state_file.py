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
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import msgspec
import trio

from .errors import DECODE_ERRORS
from .members.states import NetworkState

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 20
SAVE_EVERY_S: Final = 10.0
_MAGIC: Final = b"p2pserve-state-1\n"
_SUM_BYTES: Final = 16


class StateFile:
    """The file of one network in ``folder``."""

    def __init__(self, folder: Path, network: bytes) -> None:
        self.path = folder / f"network-{network.hex()[:16]}.state"

    def load(self) -> NetworkState | None:
        """What an earlier run has kept; None where there is none, or it is damaged."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s was not read: %s; members of an earlier run are not known", self.path, error)
            return None
        try:
            return _decode(raw)
        except (ValueError, *DECODE_ERRORS) as error:
            aside = self.path.with_suffix(".damaged")
            _log.warning("%s is damaged (%s) and was set aside as %s; starting without it", self.path, error, aside)
            with suppress(OSError):
                self.path.replace(aside)
            return None

    def save(self, state: NetworkState) -> None:
        """Replace the file; a failure is reported in the log, and costs nothing else."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encode(state))
                file.flush()
                os.fsync(descriptor)
            temporary.replace(self.path)
        except OSError as error:
            _log.warning("%s was not written: %s; free some space, or mend its permissions", self.path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"StateFile({self.path})"


def _encode(state: NetworkState) -> bytes:
    body = msgspec.msgpack.encode(state)
    return _MAGIC + blake2b(body, digest_size=_SUM_BYTES).digest() + body


def _decode(raw: bytes) -> NetworkState:
    if not raw.startswith(_MAGIC):
        raise ValueError("it is not such a file")
    checksum, body = raw[len(_MAGIC) :][:_SUM_BYTES], raw[len(_MAGIC) + _SUM_BYTES :]
    if blake2b(body, digest_size=_SUM_BYTES).digest() != checksum:
        raise ValueError("its checksum does not fit")
    return msgspec.msgpack.decode(body, type=NetworkState)


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
