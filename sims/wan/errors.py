"""What can go wrong with an emulated network, beyond a scenario that is not right."""

from __future__ import annotations


class WanError(RuntimeError):
    """The emulated network did not do what was asked: it is closed, or its process has ended."""


class WanUnavailable(WanError):
    """This machine or user cannot run that kind of emulation."""
