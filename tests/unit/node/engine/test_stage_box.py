"""A stage as a process of its own: its pipes, and command lines that are wrong."""

import pytest

from p2pserve.node.engine.dev.stage_box import main, pipe_ends

ADDRESSES = (("10.0.0.1", 7000), ("10.0.0.2", 7000), ("10.0.0.3", 7000))


def test_each_pipe_has_two_ends_with_the_same_ticket_and_the_lower_dials_the_higher() -> None:
    ends = {stage: pipe_ends(stage, ADDRESSES) for stage in range(3)}
    pipes: dict[bytes, list[tuple[int, int, str]]] = {}
    for stage, found in ends.items():
        for end in found:
            pipes.setdefault(end.ticket.link, []).append((stage, end.stage, end.kind))
            assert (end.dial is not None) == (stage < end.stage)
            if end.dial is not None:
                assert (end.dial.host, end.dial.port) == ADDRESSES[end.stage]
    assert sorted(pipes.values()) == [
        [(0, 1, "control"), (1, 0, "control")],
        [(0, 1, "data"), (1, 0, "data")],
        [(0, 2, "control"), (2, 0, "control")],
        [(1, 2, "data"), (2, 1, "data")],
    ]


@pytest.mark.parametrize(
    "arguments",
    [[], ["0"], ["x", "4,4", "7000", "a", "b"], ["2", "4,4", "7000", "a", "b"], ["0", "4,4", "7000", "a"]],
)
def test_a_wrong_command_line_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "\nstage_box: " in capsys.readouterr().err
