"""Who a node is, and the key that owns a network."""

import secrets
from pathlib import Path

from .keys import KEY_BYTES, PeerId, load_or_create_seed, peer_id_of, private_key
from .tokens import DEFAULT_USES, Bootstrap, Role, issue_token


class Identity:
    """An Ed25519 identity. Two nodes must never share one: each would overwrite what the other says."""

    __slots__ = ("_key", "_seed", "peer_id", "public_key")

    FILE = "identity.key"

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._key = private_key(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @classmethod
    def load_or_create(cls, folder: Path) -> "Identity":
        """The identity in ``folder/identity.key``, made on first use. Raises IdentityError."""
        return cls(load_or_create_seed(folder, cls.FILE))

    @classmethod
    def generate(cls) -> "Identity":
        """A new identity that lives in memory only."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @property
    def seed(self) -> bytes:
        """The secret itself, for the transport that must prove it in its handshake."""
        return self._seed

    def sign(self, payload: bytes) -> bytes:
        """A signature that :func:`.keys.verify` accepts for :attr:`peer_id`."""
        return self._key.sign(payload)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


class NetworkKey:
    """The secret that owns a network: whoever holds it decides who may join."""

    __slots__ = ("_key", "public")

    FILE = "network.key"

    def __init__(self, seed: bytes) -> None:
        self._key = private_key(seed)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    @classmethod
    def load_or_create(cls, folder: Path) -> "NetworkKey":
        """The key in ``folder/network.key``, made on first use; raises :class:`IdentityError`."""
        return cls(load_or_create_seed(folder, cls.FILE))

    @classmethod
    def generate(cls) -> "NetworkKey":
        """A new network that lives in memory only."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def sign(self, payload: bytes) -> bytes:
        """A signature by the network."""
        return self._key.sign(payload)

    def issue(
        self,
        bootstraps: tuple[Bootstrap, ...],
        role: Role,
        expires_at: float,
        *,
        lead: bool = False,
        uses: int = DEFAULT_USES,
    ) -> str:
        """A join token for ``uses`` boxes: one string, secret, good until ``expires_at`` (unix seconds). Raises
        TokenError."""
        return issue_token(self.sign, self.public, tuple(bootstraps), role, expires_at, lead=lead, uses=uses)

    def __repr__(self) -> str:
        return f"NetworkKey({self.public.hex()[:8]})"
