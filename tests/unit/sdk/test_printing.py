"""What other boxes say of themselves is printed without steering the terminal of whoever reads it."""

import io

import pytest
from rich.table import Table

from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, EngineAdvert, NodeStatus, Status
from p2pserve.sdk.actions.status_view import PlainConsole, print_status
from p2pserve.sdk.printing import printable

CLEAR = "\x1b[2J\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        ("NVIDIA A40, 45 GiB", "NVIDIA A40, 45 GiB"),
        ("größer: 模型", "größer: 模型"),
        ("two\nlines\tand more", "two\nlines\tand more"),
        ("\x1b[2J", "\ufffd[2J"),
        ("a\rb\x08\x9b", "a\ufffdb\ufffd\ufffd"),
        ("\u202eabc\u2066", "\ufffdabc\ufffd"),
        ("\ud800\u2028", "\ufffd\ufffd"),
    ],
)
def test_what_a_terminal_acts_upon_is_replaced(said: str, printed: str) -> None:
    assert printable(said) == printed


def console() -> tuple[PlainConsole, io.StringIO]:
    file = io.StringIO()
    return PlainConsole(file=file, highlight=False, markup=False, soft_wrap=True, width=300), file


def test_neither_lines_nor_cells_of_tables_let_it_through() -> None:
    out, file = console()
    table = Table("of\x1b[7m")
    table.add_row(f"a cell{CLEAR}")
    out.print(table)
    out.print(f"a line{CLEAR}")
    assert "a cell" in file.getvalue()
    assert "a line" in file.getvalue()
    assert not {"\x1b", "\x07"} & set(file.getvalue())


def test_the_status_of_a_box_that_says_anything_of_itself() -> None:
    advert = Advert(
        hardware=Hardware(cores=1, memory_gib=1.0, processor=CLEAR),
        draining=False,
        engine=EngineAdvert(state=CLEAR, detail=CLEAR, engine=CLEAR, device=CLEAR),
    )
    node = NodeStatus(peer="p" * 20, role="worker", state="alive", address=CLEAR, rtt_s=0.1, advert=advert)
    out, file = console()
    print_status(Status(answered_by="q", coordinator=CLEAR, epoch=1, nodes=(node,), plan=None), out, wide=True)
    assert "worker" in file.getvalue()
    assert not {"\x1b", "\x07"} & set(file.getvalue())
