"""What a gateway knows of prefixes when a replica is asked first, and may refuse."""

from __future__ import annotations

from collections.abc import Iterable

from p2pserve.coordinator.prefixes.held import PrefixNews, PrefixVersion, pack_names
from p2pserve.coordinator.prefixes.knowledge import ExpectedPrefill, PrefixKnowledge
from p2pserve.coordinator.prefixes.naming import prefix_names

BLOCK = 16
PROMPT = tuple(range(10 * BLOCK))


def names_of(block_tokens: int) -> list[int]:
    return list(prefix_names(PROMPT, block_tokens))


def told_of(replicas: Iterable[str]) -> PrefixKnowledge:
    """By replicas that hold nothing yet."""
    known, version = PrefixKnowledge(), PrefixVersion(1, 1)
    for replica in replicas:
        known.index.take(
            replica, PrefixNews(version=version, block_tokens=BLOCK, held=pack_names(()), lost=pack_names(()))
        )
    return known


def note(known: PrefixKnowledge, replica: str, *, is_asked: bool) -> None:
    known.note_route("r", replica, names_of, ExpectedPrefill(0.0, len(PROMPT), 0, 0), is_asked=is_asked)


def test_a_replica_that_is_asked_is_expected_to_hold_a_prompt_when_it_has_accepted_it() -> None:
    known = told_of("ab")
    note(known, "a", is_asked=True)
    assert known.find_named(names_of, 0.0) == {}
    known.note_accepted("r")
    assert known.find_named(names_of, 0.0) == {"a": len(PROMPT)}
    known.note_accepted("r")
    known.note_accepted("of nobody")


def test_who_has_refused_it_is_not_expected_to_hold_it() -> None:
    known = told_of("ab")
    note(known, "a", is_asked=True)
    note(known, "b", is_asked=True)
    known.note_accepted("r")
    assert known.find_named(names_of, 0.0) == {"b": len(PROMPT)}
    note(known, "a", is_asked=True)
    note(known, "b", is_asked=False)  # all have refused
    known.note_accepted("r")
    assert known.find_named(names_of, 0.0) == {"b": len(PROMPT)}


def test_nothing_is_kept_of_a_request_that_has_ended_while_its_replica_was_asked() -> None:
    known = told_of("a")
    note(known, "a", is_asked=True)
    known.note_end("r", None)
    known.note_accepted("r")
    assert known.find_named(names_of, 0.0) == {}
