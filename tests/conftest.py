"""Marks by folder: whoever puts a test into tests/integration or tests/gpu need not mark it."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
BY_FOLDER = {"integration": pytest.mark.integration, "gpu": pytest.mark.gpu}
NO_GPU = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test by its folder; skip those that need a GPU where there is none."""
    has_gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        mark = BY_FOLDER.get(item.path.relative_to(HERE).parts[0])
        if mark is not None:
            item.add_marker(mark)
        if item.get_closest_marker("gpu") is not None and not has_gpu:
            item.add_marker(NO_GPU)
