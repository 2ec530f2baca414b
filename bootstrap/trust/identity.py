"""Who a node is, and the key that owns a network."""

import secrets
from pathlib import Path
from typing import ClassVar, Self

from .keys import KEY_BYTES, PeerId, load_or_create_seed, peer_id_of, private_key
from .tokens import DEFAULT_USES, Bootstrap, Role, issue_token


class _SigningKey:
    """An Ed25519 key, grown from a seed that is kept in a file of a folder."""

    FILE: ClassVar[str]

    def __init__(self, seed: bytes) -> None:
        self._key = private_key(seed)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    @classmethod
    def load_or_create(cls, folder: Path) -> Self:
        """The key in ``folder/FILE``, made on first use. Raises IdentityError."""
        return cls(load_or_create_seed(folder, cls.FILE))

    @classmethod
    def generate(cls) -> Self:
        """A new one that lives in memory only."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def sign(self, payload: bytes) -> bytes:
        """A signature that :func:`.keys.verify_raw` accepts for :attr:`public`."""
        return self._key.sign(payload)


class Identity(_SigningKey):
    """Who a node is. Two nodes must never share one: each would overwrite what the other says."""

    FILE = "identity.key"

    def __init__(self, seed: bytes) -> None:
        super().__init__(seed)
        self.seed = seed  # for the transport, which must prove it in its handshake
        self.peer_id: PeerId = peer_id_of(self.public)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


class NetworkKey(_SigningKey):
    """The secret that owns a network: whoever holds it decides who may join."""

    FILE = "network.key"

    def issue(
        self,
        bootstraps: tuple[Bootstrap, ...],
        role: Role,
        expires_at: float,
        *,
        lead: bool = False,
        uses: int = DEFAULT_USES,
        secret: bytes | None = None,
    ) -> str:
        """A join token for ``uses`` boxes: one string, secret, good until ``expires_at`` (unix seconds). ``secret``:
        of an earlier one, of which this is another certificate. Raises TokenError."""
        return issue_token(
            self.sign, self.public, tuple(bootstraps), role, expires_at, lead=lead, uses=uses, secret=secret
        )

    def __repr__(self) -> str:
        return f"NetworkKey({self.public.hex()[:8]})"
