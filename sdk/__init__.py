"""What people use: the client SDK (`Client`, `AsyncClient`), the command line and its demo. Names
are loaded when first used, so that `--help` does not load the network."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import AsyncClient, AsyncGenerationStream, Client, GenerationStream
    from .errors import (
        AccessRefused,
        Busy,
        ClientClosed,
        ClientError,
        ConnectionFailed,
        DeadlineExceeded,
        InvalidAddress,
        InvalidRequest,
        NotReady,
        RequestFailed,
    )
    from .requests import GenerateOptions, Generation, TextDelta, TokenLogprobs

__all__ = [
    "AccessRefused",
    "AsyncClient",
    "AsyncGenerationStream",
    "Busy",
    "Client",
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "DeadlineExceeded",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "InvalidAddress",
    "InvalidRequest",
    "NotReady",
    "RequestFailed",
    "TextDelta",
    "TokenLogprobs",
]


def __getattr__(name: str) -> object:
    """Load a public name when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # What is quick to load comes first; `client` loads the network.
    modules = (import_module(f".{module}", __name__) for module in ("errors", "requests", "client"))
    value: object = next(getattr(module, name) for module in modules if hasattr(module, name))
    return value


def __dir__() -> list[str]:
    """The public names, whether loaded yet or not."""
    return sorted({*globals(), *__all__})
