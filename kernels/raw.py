"""`raw`: the bytes of `k`, then those of `v`. Bit-exact, NaN included; nothing is inspected; no
header."""

from __future__ import annotations

from typing import final

from .format import BlockLayout, Codec, WireDtype


@final
class RawLayout(BlockLayout):
    """Two tensors and nothing else."""

    def payload_bytes(self, dtype: WireDtype) -> int:
        """The exact length of the payload of tensors of this dtype."""
        return 2 * self.tokens * self.heads * self.head_dim * dtype.itemsize


RAW = Codec(name="raw", wire=0, bits=16.0, layout=RawLayout)
