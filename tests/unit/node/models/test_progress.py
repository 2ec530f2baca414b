"""How far a download is, in lines and on a terminal."""

from io import StringIO

import pytest

from p2pserve.node.models import DownloadProgress, ProgressLine, TerminalProgress


def progress(done: int, total: int = 10_000_000) -> DownloadProgress:
    return DownloadProgress(done_bytes=done, total_bytes=total, file="m.safetensors")


def test_lines_come_at_an_interval_and_at_the_end() -> None:
    line = ProgressLine(10.0)
    assert line.line(progress(2_000_000), 100.0) == "m.safetensors: 2.0 MB of 10.0 MB (20 %)"
    assert line.line(progress(3_000_000), 109.9) is None
    assert line.line(progress(4_000_000), 110.0) == "m.safetensors: 4.0 MB of 10.0 MB (40 %), 200.0 kB/s, 30 s left"
    assert line.line(progress(9_000_000), 119.0) is None
    assert line.line(progress(10_000_000), 119.0) == "m.safetensors: 10.0 MB of 10.0 MB (100 %), 421.1 kB/s"
    assert line.line(progress(10_000_000), 200.0) is None


def test_a_hundred_percent_is_all() -> None:
    assert progress(9_999_999).percent == 99
    assert progress(0, 0).percent == 100


class Stream(StringIO):
    """A text stream that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("terminal", "written"),
    [
        (True, "\r\x1b[Km.safetensors: 1 B of 2 B (50 %)\r\x1b[Km.safetensors: 2 B of 2 B (100 %), 1 B/s\n"),
        (False, "m.safetensors: 1 B of 2 B (50 %)\nm.safetensors: 2 B of 2 B (100 %), 1 B/s\n"),
    ],
)
def test_a_terminal_shows_one_line(terminal: bool, written: str) -> None:
    stream = Stream(terminal=terminal)
    times = iter([0.0, 0.1, 1.0])
    show = TerminalProgress(stream, lambda: next(times))
    for done in (1, 1, 2):
        show(progress(done, 2))
    assert stream.getvalue() == written
