"""Marks by folder: whoever puts a test into tests/integration or tests/gpu need not mark it. And a
home for the clients of a run, so that no test meets the members that another run has seen."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
BY_FOLDER = {"integration": pytest.mark.integration, "gpu": pytest.mark.gpu}
# How fast a busy machine is, is no property of what is tested.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
NO_GPU = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")


@pytest.fixture(scope="session", autouse=True)
def client_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where clients keep the addresses of members: a folder of this run instead of the user's; and no config file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("P2PSERVE_CONFIG", os.devnull)
        patch.setenv("P2PSERVE_HOME", os.fspath(tmp_path_factory.mktemp("clients")))
        yield


def pytest_configure() -> None:
    """Shells have background jobs ignore Ctrl-C, and so would all that tests start and end with it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test by its folder; skip those that need a GPU where there is none."""
    has_gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        mark = BY_FOLDER.get(item.path.relative_to(HERE).parts[0])
        if mark is not None:
            item.add_marker(mark)
        if item.get_closest_marker("gpu") is not None and not has_gpu:
            item.add_marker(NO_GPU)
