"""p2pserve: a peer-to-peer network that serves large language models from rented GPU boxes.

The public names are those of `p2pserve.sdk`: two clients, what they return and what they raise.
They are loaded when first used, so that `import p2pserve` costs nothing in processes that need
only one room.
"""

from typing import TYPE_CHECKING

from . import sdk

if TYPE_CHECKING:
    from .sdk import *  # noqa: F403

__version__ = "0.1.0"

__all__ = ["__version__"]
__all__ += sdk.__all__


def __getattr__(name: str) -> object:
    """Load a public name when it is asked for."""
    if name not in sdk.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(sdk, name)
    return value


def __dir__() -> list[str]:
    """The public names, whether loaded yet or not."""
    return sorted({*globals(), *__all__})
