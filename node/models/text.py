"""Between text and tokens: prompts in, answers out piece by piece, stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from .errors import ModelError, PromptError
from .opening import read_json

_SHORTEST: Final = 4  # a tokenizer that composes or folds characters leaves this part of a text's bytes, at least
_PROBED: Final = 8  # characters for each token that may be: few texts with more characters have no more tokens


@final
class TextModel:
    """Tokenizer and chat template of a model folder. Raises ModelError when one of them cannot be
    read."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"model {folder.name}: tokenizer.json cannot be read: {error}") from error
        # Settings of its training: a prompt is served whole, or refused.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings_file = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = read_json(settings_file, folder.name) if settings_file.is_file() else {}
        try:
            template = _template_text(self._settings.get("chat_template"), folder / "chat_template.jinja")
            self._template = _compile(template) if template is not None else None
        except (OSError, ValueError, jinja2.TemplateError) as error:
            raise ModelError(f"model {folder.name}: the chat template cannot be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, description in added.items() if description.special}
        self.end_tokens = _end_tokens(folder)
        """Those that end an answer."""
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        self.most_bytes_per_token = longest * (_SHORTEST if self._tokenizer.normalizer is not None else 1)
        """Bytes of text that one token can stand for, at most."""

    @property
    def vocabulary(self) -> int:
        """How many token ids have a text."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, prompt: str, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a plain prompt, with the beginning-of-text token where the model wants one. Raises PromptError
        for a text that is soon found to have more than `most`."""
        return self._encoded("prompt", prompt, most, special=True)

    def encode_chat(self, messages: list[dict[str, str]], most: int | None = None) -> tuple[int, ...]:
        """Token ids of a conversation, through the model's chat template. Raises PromptError; `most` as in `encode`."""
        if self._template is None:
            raise PromptError("messages: this model has no chat template; send `prompt` instead")
        try:
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **{key: _token_text(self._settings.get(key)) for key in ("bos_token", "eos_token")},
            )
        except Exception as error:  # a template is a program: it may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"messages: the model's chat template refuses them: {reason}") from error
        # The template writes special tokens itself.
        return self._encoded("messages", text, most, special=False)

    def decoder(self) -> TextDecoder:
        """A decoder for one answer."""
        return TextDecoder(self._tokenizer, self._special)

    def _encoded(self, field: str, text: str, most: int | None, *, special: bool) -> tuple[int, ...]:
        if most is not None and len(text) > _PROBED * most:
            # The library takes 200 bytes of memory for each of a text: what is far too long shows at its beginning. The
            # word that is cut there may count for some tokens more than it does in the whole text.
            head = len(self._encoded(field, text[: _PROBED * most], None, special=False))
            if head > most + most // 8:
                raise PromptError(
                    f"{field}: {head} tokens in the first {_PROBED * most} of {len(text)} characters are too long; "
                    f"this model holds {most}, the answer included"
                )
        # Of the library's calls, only those for batches let other threads run meanwhile, which megabytes need.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return tuple(encoding.ids)


def _template_text(setting: object, file: Path) -> str | None:
    """The template among a tokenizer's settings (one, or several by name), else the one in a file
    of its own."""
    if isinstance(setting, list):
        named = {entry.get("name"): entry.get("template") for entry in setting if isinstance(entry, dict)}
        setting = named.get("default")
    if isinstance(setting, str):
        return setting
    return file.read_text("utf-8") if file.is_file() else None


def _end_tokens(folder: Path) -> frozenset[int]:
    """The model's own, and those of its generation settings."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        value = read_json(file, folder.name).get("eos_token_id") if file.is_file() else None
        found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    return frozenset(found)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string(template)


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


_REPLACEMENT = "\ufffd"
_WINDOW = 8  # tokens of left context that decide how a token is written


@final
class TextDecoder:
    """Tokens in, text out. A character that is not complete yet is held back until it is, or until
    the end."""

    def __init__(self, tokenizer: Tokenizer, special: set[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._pending: list[int] = []  # tokens whose text may still change, after some that are settled
        self._settled = 0

    def push(self, tokens: tuple[int, ...]) -> str:
        """Text that these tokens complete."""
        self._pending += [token for token in tokens if token not in self._special]
        return self._take(final=False)

    def finish(self) -> str:
        """Whatever is still held back; bytes that are no character become U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._pending[: self._settled], skip_special_tokens=False)
        after = self._tokenizer.decode(self._pending, skip_special_tokens=False)
        if after.endswith(_REPLACEMENT) and not final:
            return ""
        self._pending = self._pending[-_WINDOW:]
        self._settled = len(self._pending)
        return after[len(before) :]


@final
class StopFinder:
    """Cuts an answer at the stop string that is complete first, also one that is spread over
    several pieces.

    Of several that end at the same character the longest counts. So the cut does not depend on how
    the text came in pieces, which differs between engines.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return what may be shown; what could be the start of a stop string is held back."""
        if not self._stops or self.found:
            return "" if self.found else text
        self._held += text
        places = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)[1]], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
