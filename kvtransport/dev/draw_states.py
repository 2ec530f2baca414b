"""The diagram of a transfer's states in the docs, drawn from the tables that the link's machines
run on.

    python -m p2pserve.kvtransport.dev.draw_states [docs/kvtransport.md]

Without a file it prints the section; with one it replaces the section between the two marks there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..link.transfers import MEANINGS, TRANSITIONS, TransferStatus

BEGIN = "<!-- drawn by python -m p2pserve.kvtransport.dev.draw_states: do not edit -->"
END = "<!-- end of what is drawn -->"


def draw() -> str:
    """The section: a state diagram for Mermaid, and what each event is at either end."""
    lines = [BEGIN, "```mermaid", "stateDiagram-v2", f"    [*] --> {TransferStatus.WAITING}"]
    labels: dict[tuple[TransferStatus, TransferStatus], list[str]] = {}
    for (status, event), after in TRANSITIONS.items():
        labels.setdefault((status, after), []).append(event)
    lines += [f"    {status} --> {after}: {', '.join(events)}" for (status, after), events in labels.items()]
    left = {status for status, _ in TRANSITIONS}
    lines += [f"    {status} --> [*]" for status in TransferStatus if status not in left]
    lines += ["```", "", "| event | at the sending end | at the receiving end |", "|---|---|---|"]
    lines += [f"| {event} | {sending} | {receiving} |" for event, (sending, receiving) in MEANINGS.items()]
    return "\n".join([*lines, END])


def replace_section(text: str) -> str:
    """A page with its section drawn anew. Raises ValueError if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}: add them where the diagram belongs")
    return before + draw() + after


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.kvtransport.dev.draw_states", description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", help="a page to rewrite, such as docs/kvtransport.md")
    page: Path | None = parser.parse_args(arguments).page
    if page is None:
        sys.stdout.write(draw() + "\n")
        return 0
    try:
        page.write_text(replace_section(page.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(f"{page}: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
