"""p2pserve: a peer-to-peer network that serves large language models from rented GPU boxes.

The public names are the clients; `Client` blocks, `AsyncClient` runs under trio. They are loaded when first
used, so that `import p2pserve` costs nothing in processes that need only one room.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sdk.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"

_LAZY = {"AsyncClient": ".sdk.client", "Client": ".sdk.client"}


def __getattr__(name: str) -> object:
    """Load a public name when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name], __name__), name)
    return value


def __dir__() -> list[str]:
    """The public names, whether loaded yet or not."""
    return sorted({*globals(), *__all__})
