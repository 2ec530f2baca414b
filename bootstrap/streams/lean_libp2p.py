"""Lets libp2p be imported without what this room never uses of it: half of its time and 30 MB.

`import libp2p` brings QUIC, WebSocket, TLS with ACME, DNS, mDNS, a DHT, relays and metrics, and one
package (`fastecdsa`, for NIST curves) that is C source and needs GMP's headers. Ours are TCP, Noise and
Ed25519 keys, and addresses with numbers. While :func:`import_lean` is entered, modules of those names
are empty stand-ins, whose every name is a class that only annotations and `isinstance` may use: whoever
calls one is told what is missing. Afterwards the names are free again, so that whoever else in the
process wants `requests` imports the real one.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn, Self, cast

UNUSED: Final = (
    "aioquic",
    "dns",
    "fastecdsa",
    "libp2p.discovery",
    "libp2p.host",
    "libp2p.kad_dht",
    "libp2p.relay",
    "libp2p.security.insecure",
    "libp2p.security.secio",
    "libp2p.security.tls",
    "libp2p.stream_muxer.mplex",
    "libp2p.transport.quic",
    "libp2p.transport.websocket",
    "miniupnpc",
    "prometheus_client",
    "requests",
    "zeroconf",
)


MADE_UNUSED: Final = ("dns.asyncresolver.Resolver",)
"""Each swarm makes one, and asks it only where an address has a name instead of numbers."""


class _Refusing(type):
    def __getattr__(cls, name: str) -> type["Unavailable"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__qualname__}.{name}", cls.__module__)


class Unavailable(metaclass=_Refusing):
    """Stands for a name of a module that is left out; being called raises ImportError."""

    def __new__(cls, *args: object, **settings: object) -> NoReturn:
        """Say what is missing."""
        raise _missing(cls)


class UnavailableWhenUsed(Unavailable):
    """Stands for a class that libp2p makes an instance of, and never uses."""

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Say nothing yet."""
        return object.__new__(cls)

    def __getattr__(self, name: str) -> NoReturn:
        raise _missing(type(self))


def _missing(cls: type) -> ImportError:
    return ImportError(f"p2pserve imports libp2p without {cls.__module__}; {cls.__qualname__} is not there")


def _stand_in(name: str, module: str) -> type[Unavailable]:
    base = UnavailableWhenUsed if f"{module}.{name}" in MADE_UNUSED else Unavailable
    return cast(type[Unavailable], _Refusing(name, (base,), {"__module__": module, "__qualname__": name}))


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each name below `UNUSED`."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of a name that is left out; None of others."""
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in UNUSED):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module a stand-in for each name that is asked of it."""

        def missing(name: str) -> type[Unavailable]:
            if name.startswith("__"):
                raise AttributeError(name)
            return _stand_in(name, module.__name__)

        module.__getattr__ = missing  # type: ignore[method-assign]
        self.made.append(module.__name__)


@contextmanager
def import_lean() -> Iterator[None]:
    """Import libp2p within this, once in a process; a module that is there already stays the real one."""
    stand_ins = _StandIns()
    sys.meta_path.insert(0, stand_ins)
    try:
        yield
    finally:
        sys.meta_path.remove(stand_ins)
        for name in stand_ins.made:
            sys.modules.pop(name, None)
