"""The states of a KV transfer in docs/kvtransport.md: `python tests/unit/docs/transfer_states.py` draws them anew,
from the tables that the link's machines run on.
"""

from __future__ import annotations

from pathlib import Path

from p2pserve.kvtransport.link.transfers import TRANSITIONS, TransferEvent, TransferStatus

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kvtransport.md"
BEGIN = "<!-- drawn by python tests/unit/docs/transfer_states.py: do not edit -->"
END = "<!-- end of what is drawn -->"

MEANINGS: dict[TransferEvent, tuple[str, str]] = {
    TransferEvent.GRANTED: ("a Credit raises the limit", "`grant` gives it a window"),
    TransferEvent.COMPLETED: ("every frame has been cut: End is queued", "End and every frame have arrived"),
    TransferEvent.ACKNOWLEDGED: ("a Result says delivered", "`acknowledge`: the KV is in place"),
    TransferEvent.ABORTED: (
        "`abort`, deadline, no connection, end of the link",
        "`abort`, deadline, no connection, end of the link",
    ),
    TransferEvent.REFUSED: ("a Result says failed", "an Abort has arrived"),
}
"""What each event is at the sending and at the receiving end."""


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


def page_with(text: str) -> str:
    """The page with its section drawn anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + draw() + after


def main() -> None:
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
