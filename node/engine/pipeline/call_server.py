"""What answers at the far end of a control pipe: carries out calls, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, final

from ....kvtransport.errors import TransferError
from ....kvtransport.wire.pipe import Pipe
from ..process import explain
from ..settings import PIPELINE_DEFAULTS, PipelineSettings
from ..stage_pipes import PipelineError, StageLost
from .pipes import OnLost, PipeInput
from .vocabulary import CALLABLE, CODEC, Call, CallFailed, CallResult

_log = logging.getLogger(__name__)


class CallTarget(Protocol):
    """What the calls are for, once it is loaded."""

    def merges(self) -> bool:
        """Whether it takes merged activations."""

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one of `CALLABLE`."""


@final
class CallServer:
    """Serves on the thread that calls `serve`; `load` gets what the caller's first call sends.
    `on_lost`: the caller is gone; called by another thread during a call, which may never end."""

    def __init__(
        self,
        control: Pipe,
        load: Callable[..., CallTarget],
        on_lost: OnLost = lambda error: None,
        settings: PipelineSettings = PIPELINE_DEFAULTS,
    ) -> None:
        self._control = control
        self._load = load
        self._calls = PipeInput(control, "the head", on_lost, settings)
        self._serving: CallTarget | None = None

    def __repr__(self) -> str:
        return f"<CallServer {'loaded' if self._serving else 'empty'} {self._calls}>"

    def serve(self) -> None:
        """Until the head is lost or a call fails. Raises StageLost for the first, PipelineError for the second."""
        while True:
            call = self._calls.get()
            try:
                result = self._carry_out(call)
                self._control.send(CODEC.encode(CallResult(call.number, result)))
            except TransferError as error:
                raise StageLost(f"the head is lost: {error}") from error
            except Exception as error:
                reason = explain(error)
                _log.exception("a call of the head failed")
                self._control.send(CODEC.encode(CallFailed(reason)))
                raise PipelineError(reason) from error

    def _carry_out(self, call: Any) -> Any:
        if not isinstance(call, Call):
            raise PipelineError(f"a {type(call).__name__} where a call belongs")
        if call.method == "load":
            self._serving = self._load(*call.args)
            return self._serving.merges()
        if call.method not in CALLABLE or self._serving is None:
            raise PipelineError(f"{call.method[:64]!r} is nothing that a stage can be asked to do now")
        return self._serving.call(call.method, call.args, call.kwargs)
