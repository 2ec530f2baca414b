"""The life of one request at its gateway, as a machine without I/O; gateways and the simulator run
the same one."""

from .machine import RequestMachine
from .placement import place
from .values import (
    Action,
    Answer,
    CancelTransfer,
    CancelWork,
    EndRequest,
    FindRoute,
    OpenDecode,
    OpenPrefill,
    PassFirstToken,
    Ready,
    RequestRecord,
    RequestSettings,
    ShowTokens,
    Tokens,
)

__all__ = [
    "Action",
    "Answer",
    "CancelTransfer",
    "CancelWork",
    "EndRequest",
    "FindRoute",
    "OpenDecode",
    "OpenPrefill",
    "PassFirstToken",
    "Ready",
    "RequestMachine",
    "RequestRecord",
    "RequestSettings",
    "ShowTokens",
    "Tokens",
    "place",
]
