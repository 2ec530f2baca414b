"""Whose requests share cached prompts: the salt that goes into the names of their prefixes (vLLM's `cache_salt`).

Who may see how fast a prompt is answered may learn from it whether somebody else has sent the same one. So requests
with API keys share with none but those of the same key, unless its owner lets several share one cache; and networks
never share, even where one box serves first in one and then in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, final

import msgspec

from ...bootstrap import PeerId
from ..requests.local_clients import PREFIX

SALT_CHARS: Final = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSalts:
    """Of one gateway. `network`: its public key; `gateway`: the node, whose owner gives out API keys; `caches`: by the
    name of a key, the cache that its owner lets it share with others, on all gateways of the network."""

    network: bytes = b""
    gateway: str = ""
    caches: Mapping[str, str] = field(default_factory=dict)

    def salt_for(self, client: PeerId, asked: str) -> str:
        """The salt of a client's request that itself asks for a cache of its own by `asked`.

        Who comes without a key shares with all others that do: they all hold the network's tokens.
        """
        tenant: tuple[str, ...] = ()
        if client.startswith(PREFIX) and (key := client.removeprefix(PREFIX)):
            cache = self.caches.get(key)
            tenant = ("cache", cache) if cache else ("key", self.gateway, key)
        # packed, so that no choice of names makes two tenants one; hashed, so that no box learns names of keys
        packed = msgspec.msgpack.encode((self.network, tenant, asked))
        return sha256(packed).hexdigest()[:SALT_CHARS]
