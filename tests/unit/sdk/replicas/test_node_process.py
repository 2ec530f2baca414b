"""Options of `join` on their way to the process of a node."""

from pathlib import Path

from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.node.owner.dividing import DividedBox
from p2pserve.sdk.replicas.node_process import DIVIDED, read_options, write_options

from ..commands.parsing import parse


def test_a_node_gets_the_options_that_the_command_was_given() -> None:
    given = vars(
        parse([
            "join", "--bootstrap", "p2p_worker_x", "--home", "/srv/p2p", "--api-key-file", "/srv/keys",
            "--served-model-name", "a", "--served-model-name", "b", "--ends-at", "2h", "--no-async-scheduling",
            "--", "--tool-call-parser", "hermes",
        ])
    )  # fmt: skip
    del given["config"]  # it has been read
    line = write_options(given)
    assert b"\n" not in line
    found = vars(read_options(line + b"\n"))
    assert found == given
    assert (found["home"], found["api_key_file"]) == (Path("/srv/p2p"), Path("/srv/keys"))
    assert found["served_model_name"] == ("a", "b")


def test_a_node_is_told_of_the_machine_that_it_shares() -> None:
    offers = (CutOffer(replicas=1, tp=2, longest=4096), CutOffer(replicas=2, tp=1, longest=4096))
    division = BoxDivision(head="a", nodes=("a", "b"), offers=offers, refused=1, why='node: a "reason"')
    told = DividedBox(division=division, not_before=1764100000.5)
    assert vars(read_options(write_options({DIVIDED: told})))[DIVIDED] == told
