"""A line rewritten in place on a terminal, lines that stay anywhere else."""

import io

from p2pserve.sdk.live_line import REPEAT_S, LiveLine


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_has_one_line_that_goes_when_the_work_is_done() -> None:
    stream = Terminal()
    with LiveLine(stream, Clock(), columns=20) as line:
        line.show("weights 1/8")
        line.show("weights 1/8")
        line.show("weights 2/8, and this is too long")
    assert stream.getvalue() == "\r\x1b[Kweights 1/8\r\x1b[Kweights 2/8, and...\r\x1b[K"


def test_a_line_that_stays_goes_above_the_one_that_moves() -> None:
    stream = Terminal()
    line = LiveLine(stream, Clock(), columns=40)
    line.say("first")
    line.show("warming up")
    line.say("second")
    assert stream.getvalue() == "first\n\r\x1b[Kwarming up\r\x1b[Ksecond\nwarming up"


def test_elsewhere_new_words_are_a_line_and_new_figures_one_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    with LiveLine(stream, clock) as line:
        line.show("imports vLLM")
        line.show("weights 1/800")
        for done in range(2, 100):
            clock.now += REPEAT_S / 50
            line.show(f"weights {done}/800")
        line.show("warming up")
        line.say("ready")
    assert stream.getvalue() == "imports vLLM\nweights 1/800\nweights 52/800\nwarming up\nready\n"


def test_what_another_box_has_said_steers_no_terminal() -> None:
    stream = Terminal()
    line = LiveLine(stream, Clock(), columns=40)
    line.show("a\x1b[2Jb\nc")
    assert stream.getvalue() == "\r\x1b[Ka\N{REPLACEMENT CHARACTER}[2Jb c"
