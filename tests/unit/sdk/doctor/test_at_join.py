"""What `join` says of a box by itself."""

from pathlib import Path

import pytest

from p2pserve.node.box.errors import NodeError
from p2pserve.sdk.doctor import at_join, checks
from p2pserve.sdk.doctor.at_join import describe_unfit, examine_box


def test_a_line_for_what_is_not_as_it_should_be_and_none_for_the_rest(tmp_path: Path) -> None:
    bad = checks.check_disk(1, 0, "/d")
    assert describe_unfit([checks.check_home(tmp_path, None, None), bad]) == [f"disk: {bad.found}; {bad.fix}"]


def test_a_box_without_an_engine_needs_no_gpu(tmp_path: Path) -> None:
    looked = {each.check for each in examine_box(tmp_path / "a" / "node", None, has_engine=False)}
    assert looked == {"disk", "memory"}
    assert {"gpu", "shm"} < {each.check for each in examine_box(tmp_path, 1, has_engine=True)}


def test_a_broken_driver_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise NodeError("the driver does not answer; start the box anew")

    monkeypatch.setattr(at_join, "probe", probe)
    [line] = describe_unfit(examine_box(tmp_path, None, has_engine=True))
    assert line == "gpu: the driver does not answer; start the box anew"
