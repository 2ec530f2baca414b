"""Clusters described in files: what they mean, and what is said of wrong ones."""

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import GpuError, Specs
from p2pserve.coordinator.planning.model.cluster import Box, Cluster, ClusterError
from p2pserve.coordinator.planning.model.cluster_file import cluster_names, packaged_cluster, parse_cluster

A40 = {"id": "a40", "gpu": "A40", "gpus": 4}
TI = {"id": "ti", "gpu": "RTX 3090 Ti"}


def text(boxes: object, **rest: object) -> bytes:
    return msgspec.json.encode({"name": "test", "boxes": boxes, **rest})


def test_boxes_of_a_kind_and_links_from_the_general_to_the_particular() -> None:
    cluster = parse_cluster(
        text(
            [{**A40, "count": 2, "site": "oslo"}, {**TI, "site": "rome", "usd_per_hour": 1.5}],
            default={"gbps": 1, "rtt_ms": 30, "usd_per_gb": 0.02},
            within_site={"gbps": 10, "rtt_ms": 0.5},
            links=[
                {"a": "a40-1", "b": "ti", "gbps": 3, "rtt_ms": 20, "one_way": True},
                {"a": "oslo", "b": "rome", "gbps": 2},
            ],
        )
    )
    assert [box.id for box in cluster.boxes] == ["a40-0", "a40-1", "ti"]
    assert cluster.gpus == 9
    assert cluster.usd_per_hour == pytest.approx(2 * 4 * 0.44 + 1.5)
    off = cluster.gbps.copy()
    np.fill_diagonal(off, 0)
    assert off.tolist() == [[0, 10, 2], [10, 0, 3], [2, 2, 0]]
    assert cluster.rtt_s[1, 2] == pytest.approx(0.02)
    assert cluster.usd_per_gb[0, 1] == 0
    assert cluster.without(frozenset({"a40-0"})).gbps[0, 1] == 3


def test_a_column_of_the_table_can_be_chosen() -> None:
    assert parse_cluster(text([A40]), Specs.TABLE1).boxes[0].gpu.tflops == 149.7
    assert parse_cluster(text([{"id": "x", "gpu": "A6000"}]), Specs.TABLE1).boxes[0].gpu.tflops == 38.7
    with pytest.raises(GpuError, match="Table 1 has no H100"):
        parse_cluster(text([{"id": "x", "gpu": "H100"}]), Specs.TABLE1)


def test_nvlink_is_faster_than_pcie_and_must_be_there() -> None:
    wired, plain = (parse_cluster(text([{**A40, "nvlink": wired}])).boxes[0].gpu_link_gbps for wired in (True, False))
    assert wired > 2 * plain
    with pytest.raises(ClusterError, match="nvlink is true, and L4-24GB has none"):
        parse_cluster(text([{"id": "x", "gpu": "L4", "nvlink": True}]))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"{", "cluster file: Input data was truncated"),
        (text([A40], boxs=[]), "unknown field `boxs`"),
        (b'{"name": "x", "boxes": [{"id": "a", "gpu": "A40", "usd_per_hour": NaN}]}', "invalid character"),
        (text([]), "the cluster has no boxes"),
        (text([{"id": "a", "gpu": "A41"}]), r"boxes: a: GPU 'A41' is not in the table"),
        (text([A40, A40], default={"gbps": 1}), "box a40 is there twice"),
        (text([{**A40, "gpus": 0}]), "boxes: a40: gpus is 0; it must be between 1 and 64"),
        (text([{**A40, "gpus": 5000}]), "boxes: a40: gpus is 5000"),
        (text([{**A40, "gpus": 10**30}]), r"boxes: a40: gpus is 1e\+30"),
        (text([{**A40, "count": 10**5}]), r"boxes: a40: count is 100000; it must be between 1 and 1024"),
        (text([{**A40, "count": 10**9}]), r"boxes: a40: count is 1e\+09"),
        (text([{**A40, "count": 600}, {**TI, "count": 600}]), "boxes: 1200 in all; a plan is made for at most 1024"),
        (text([{**A40, "id": "two\nlines"}]), r"boxes: id 'two\\nlines': a name is one line of at most 128"),
        (text([{**A40, "site": "s" * 129}]), "boxes: site 's+': a name is one line"),
        (text([{**A40, "gpu_link_gbps": 1e-300}]), "boxes: a40: gpu_link_gbps is 1e-300"),
        (text([A40, TI], default={"gbps": 1e-300}), "default: gbps is 1e-300; it must be between 1e-06 and"),
        (text([A40, TI], default={"gbps": 1, "rtt_ms": 1e300}), r"default: rtt_ms is 1e\+300; it must be"),
        (
            text([A40, TI], default={"gbps": 1}, links=[{"a": "ti", "b": "ti", "gbps": 1}]),
            "a box has no link to itself",
        ),
        (text([{**A40, "count": 0}]), "boxes: a40: count is 0"),
        (text([{**A40, "usd_per_hour": -1}]), "boxes: a40: usd_per_hour is -1"),
        (text([A40, TI]), "box ti has no links both ways"),
        (text([A40, TI], links=[{"a": "a40", "b": "ti", "gbps": 1, "one_way": True}]), "box ti has no links both ways"),
        (text([A40, TI], default={"gbps": 0}), "default: gbps is 0"),
        (text([A40, TI], default={"gbps": 1, "rtt_ms": -1}), "default: rtt_ms is -1"),
        (text([A40, TI], default={"gbps": 1, "usd_per_gb": -1}), "default: usd_per_gb is -1"),
        (text([A40], links=[{"a": "q", "b": "a40", "gbps": 1}]), r"links\[0\] \(q - a40\): 'q' is neither a box nor"),
        (text([{**A40, "site": "s"}], links=[{"a": "a40", "b": "a40", "gbps": 1}]), "a box has no link to itself"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(data: bytes, line: str) -> None:
    with pytest.raises((ClusterError, GpuError), match=line) as caught:
        parse_cluster(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", cluster_names())
def test_every_packaged_cluster_can_be_read(name: str) -> None:
    assert packaged_cluster(name).gpus >= 2


def test_thunderserves_cluster_costs_what_its_table_says() -> None:
    assert packaged_cluster("thunderserve-cloud-32").usd_per_hour == pytest.approx(11.328)
    assert packaged_cluster("thunderserve-8xa100").usd_per_hour == pytest.approx(14.024)
    with pytest.raises(ClusterError, match="neither a file nor one of cronus-a100-a10, "):
        packaged_cluster("thunder")


def test_a_matrix_with_a_figure_that_cannot_be_names_the_link() -> None:
    gpu = packaged_cluster("thunderserve-8xa100").boxes[0].gpu
    boxes = (Box(id="a", gpu=gpu, gpus=1), Box(id="b", gpu=gpu, gpus=1))
    good = np.ones((2, 2))
    bad = np.array([[np.nan, 1.0], [np.nan, 1.0]])
    with pytest.raises(ClusterError, match=r"cluster.rtt_s has a figure of nan: b -> a"):
        Cluster(boxes=boxes, gbps=good, rtt_s=bad, usd_per_gb=good)
    with pytest.raises(ClusterError, match="shape"):
        Cluster(boxes=boxes, gbps=good[:1], rtt_s=good, usd_per_gb=good)
