"""A command for the node of this box finds it, whether that runs `join` or `bootstrap`."""

from pathlib import Path

from p2pserve.node.box.home import lock_home
from p2pserve.sdk.box.own_nodes import find_own_node


def test_the_chosen_one_is_taken(tmp_path: Path) -> None:
    assert find_own_node(tmp_path, "bootstrap") == "bootstrap"


def test_the_one_that_has_run_is_found(tmp_path: Path) -> None:
    assert find_own_node(tmp_path, None) == "node"
    (tmp_path / "bootstrap").mkdir()
    assert find_own_node(tmp_path, None) == "bootstrap"
    (tmp_path / "node").mkdir()
    assert find_own_node(tmp_path, None) == "node"


def test_one_that_runs_comes_before_one_that_has_run(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    with lock_home(tmp_path / "bootstrap"):
        assert find_own_node(tmp_path, None) == "bootstrap"
        with lock_home(tmp_path / "node"):
            assert find_own_node(tmp_path, None) == "node"
