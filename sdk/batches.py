"""Many requests of one client: what each prompt is, and how far they have come, in a line of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from .errors import ClientError, InvalidRequest
from .requests import Generation, build_request

CONCURRENCY: Final = 32  # requests of a batch at once; gateways serve clients in turn, however many each has

Prompt = str | Iterable[int] | Iterable[Mapping[str, str]]
"""A text, the ids of its tokens, or a conversation."""
Outcome = Generation | ClientError
Progress = bool | Callable[[int, int], object]
"""Whether to show a bar on standard error; or what is called with how many of how many have ended."""
Advance = Callable[[Outcome], None]


def build_batch(prompts: Iterable[Prompt], options: Mapping[str, Any]) -> list[Any]:
    """A checked request, or what is wrong with it, for each prompt. Raises InvalidRequest for what is wrong with all of
    them."""
    given: object = prompts
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequest("prompts: give a list of prompts; for a single one there is `generate`")
    build_request("x", None, options)
    return [_build(prompt, options) for prompt in prompts]


def check_concurrency(concurrency: object) -> int:
    """How many at once. Raises InvalidRequest."""
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidRequest(f"concurrency: {concurrency!r} is not a number of requests from 1 up")
    return concurrency


@contextmanager
def show_progress(progress: Progress, total: int) -> Iterator[Advance]:
    """Show how far a batch has come for the length of the body, which calls what it gets with each outcome."""
    if progress is not True:
        ended = 0

        def count(outcome: Outcome) -> None:
            nonlocal ended
            ended += 1
            if callable(progress):
                progress(ended, total)

        yield count
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}"))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, said="")
        tokens = failed = 0

        def advance(outcome: Outcome) -> None:
            nonlocal tokens, failed
            if isinstance(outcome, Generation):
                tokens += len(outcome.tokens)
            else:
                failed += 1
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
            bar.update(task, advance=1, said=f"{rate}, {failed} failed" if failed else rate)

        yield advance


def _build(prompt: Prompt, options: Mapping[str, Any]) -> Any:
    given: object = prompt
    try:
        if isinstance(given, str):
            return build_request(given, None, options)
        items = list(given) if isinstance(given, Iterable) and not isinstance(given, bytes | Mapping) else None
        if items and all(isinstance(item, Mapping) for item in items):
            return build_request(None, [dict(item) for item in items], options)
        if items and all(isinstance(item, int) for item in items):
            return build_request(None, None, {**options, "prompt_token_ids": items})
    except InvalidRequest as error:
        return error
    return InvalidRequest(f"prompts: {str(given)[:80]!r} is no text, no list of token ids and no conversation")
