"""Lets libp2p start without `fastecdsa`, which it imports for NIST curves that nobody here uses.

`fastecdsa` is C source that needs GMP's headers. Our keys are Ed25519 and X25519, from
`cryptography`. Where it is absent its names are filled in, and using one says what is missing.
Import this before libp2p."""

import importlib.util
import sys
import types
from typing import Final, NoReturn

MODULES: Final = ("fastecdsa", "fastecdsa.encoding", "fastecdsa.encoding.sec1")


class _Refusing(type):
    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()


class Unavailable(metaclass=_Refusing):
    """Stands for a name of `fastecdsa` in annotations; any other use raises ImportError."""

    def __new__(cls, *args: object, **settings: object) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise ImportError("keys on NIST curves need the package fastecdsa; p2pserve's own keys are Ed25519")


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "Filled in by p2pserve.bootstrap.streams.ecdsa.")

    def missing(attribute: str) -> type[Unavailable]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (Unavailable,), dict.fromkeys(("Curve", "Point", "int_bytelen"), Unavailable))

    module.__getattr__ = missing  # type: ignore[method-assign]
    module.__path__ = []
    return module


if importlib.util.find_spec(MODULES[0]) is None:
    sys.modules.update({name: _module(name) for name in MODULES})
