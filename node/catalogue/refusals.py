"""What a node answers to an admin that it cannot do it, as clients tell it apart."""

from __future__ import annotations

from typing import Final

NOT_OWNER: Final = "not_owner"
"""This box has not the network's key: another one is to be asked."""
