"""How far real engine processes say that they are while they load."""

import json
import shutil
from pathlib import Path

import pytest
import trio
from safetensors.torch import load_file, save_file

from p2pserve.node.engine import protocol
from p2pserve.node.models.checkpoint import INDEX_FILE
from p2pserve.node.replica.loading import LoadingWorkers, describe_starting

from ..devices import require_devices
from ..kv_engines import engines

FILES = 4


def split_weights(model: Path, folder: Path) -> Path:
    """The same model with its tensors in FILES files."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number in range(FILES):
        name = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        part = dict(list(tensors.items())[number::FILES])
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.mark.parametrize("tp", [1, 2])
def test_the_files_of_the_weights_are_told_by_each_worker_and_shown_once(
    engine_channels: list[int], random_model: Path, tmp_path: Path, tp: int
) -> None:
    require_devices(tp)
    model = split_weights(random_model, tmp_path / "split")
    told: list[protocol.Starting] = []

    async def main() -> None:
        async with engines(engine_channels, model) as start:
            told.extend((await start(tp=tp)).starting)

    trio.run(main)
    for worker in range(tp):
        own = [said for said in told if said.worker == worker]
        assert [(said.part, said.file) for said in own] == [
            *(("weights", file + 1) for file in range(FILES)),
            ("warm-up", 0),
        ]
        assert {said.workers for said in own} == {tp}
    workers = LoadingWorkers()
    shown = list(dict.fromkeys(describe_starting(workers.take(said)) for said in told))
    assert shown == ["weights 1/4", "weights 2/4", "weights 3/4", "weights 4/4", "warms up"]
