"""A command for the node of this box finds it, whether that runs `join` or `bootstrap`."""

from pathlib import Path

from p2pserve.node.box.home import lock_home
from p2pserve.sdk.box.own_nodes import find_own_nodes
from p2pserve.sdk.options.values import folder_of_node, is_own_node, number_of_node


def find_own_node(home: Path, chosen: str | None) -> str:
    (found,) = find_own_nodes(home, chosen)
    return found


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


def test_all_nodes_of_a_join_are_found_in_their_order(tmp_path: Path) -> None:
    for name in ("node-10", "node-2", "node", "node-1", "node-02", "nodes", "bootstrap"):
        (tmp_path / name).mkdir()
    (tmp_path / "node-3").write_text("no folder")
    assert find_own_nodes(tmp_path, None) == ("node", "node-2", "node-10")
    assert find_own_nodes(tmp_path, "node-2") == ("node-2",)
    with lock_home(tmp_path / "node-2"), lock_home(tmp_path / "bootstrap"):
        assert find_own_nodes(tmp_path, None) == ("node-2",)


def test_folders_are_numbered() -> None:
    assert [folder_of_node(number) for number in (1, 2, 11)] == ["node", "node-2", "node-11"]
    assert [number_of_node(folder_of_node(number)) for number in (1, 2, 11)] == [1, 2, 11]
    assert [name for name in ("node-1", "node-x", "Node", "bootstrap") if is_own_node(name)] == ["bootstrap"]
