"""The bench's arithmetic where a GPU would be; its rows of the CPU are what a run shows."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch

from p2pserve.kernels.codecs import CODECS
from p2pserve.kernels.dev import bench
from p2pserve.kernels.format import Codec
from p2pserve.kernels.raw import RAW


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_rows_of_a_gpu_are_rates_of_one_block_out_of_a_queue(codec: Codec) -> None:
    """Events that are always 2 ms apart, for 2 blocks of 1 MiB: 1.049 GB/s, and as much for the
    copy.
    """
    events = Mock()
    events.return_value.elapsed_time.return_value = 2.0
    with (
        patch.object(torch.cuda, "Event", events),
        patch.object(bench, "HOLD_BYTES", 16),
        patch.object(bench, "QUEUED", 2),
    ):
        rows = bench.measure_on_gpu(codec, torch.device("cpu"), 256, 1)
    assert [(row.op, row.gbps_16bit, row.memcpy_gbps, row.of_memcpy) for row in rows] == [
        ("quantise", 1.049, 1.049, 1.0),
        ("dequantise", 1.049, 1.049, 1.0),
    ]
    assert {row.path for row in rows} == {"copy" if codec is RAW else "triton"}
