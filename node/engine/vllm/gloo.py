"""One network thread for all of gloo's process groups. vLLM makes a dozen in every worker; each
one's own thread would wake a hundred times a second."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, ClassVar, cast, final

from torch.distributed import ProcessGroupGloo, distributed_c10d


@final
class _OnOneDevice(ProcessGroupGloo):
    """A group on the device of this process. A fork makes its own: it does not inherit the thread."""

    devices: ClassVar[dict[int, Any]] = {}  # process id -> device

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = cast("Any", ProcessGroupGloo)._Options()  # noqa: SLF001 (torch has no other way to say it)
        device = self.devices.get(os.getpid())
        if device is None:
            device = self.devices[os.getpid()] = ProcessGroupGloo.create_default_device()
        options._devices = [device]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """From now on, in this process and those that it forks. Again is no matter."""
    distributed_c10d.ProcessGroupGloo = _OnOneDevice  # type: ignore[misc]
