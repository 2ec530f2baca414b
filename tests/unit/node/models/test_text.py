"""Text and tokens: nothing is lost, repeated or shown half, however an answer comes in pieces."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from p2pserve.node.models import BUNDLED, BUNDLED_MODELS, ModelError
from p2pserve.node.models.errors import PromptError
from p2pserve.node.models.text import StopFinder, TextDecoder, TextModel

TEXT = TextModel(BUNDLED)
LIBRARY = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
END = 0  # <|endoftext|> of the bundled tokenizer
TEXTS = [
    "",
    "def f(x):\n    return x + 1\n",
    "naïve café, Straße, ñandú",
    "世界你好，こんにちは",
    "🙂🙃👩‍👩‍👧‍👦 flags 🇦🇹",
    "a\ufffdb\ufffd",
    "\ufffd",
    "\x00\x01\t\r\n  \n\n",
    "e\u0301 z\u0335 \u200d",
    " leading and trailing ",
]


def cut(tokens: tuple[int, ...], sizes: Iterable[int]) -> list[tuple[int, ...]]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(tokens[at : at + size])
        at += size
    return [*pieces, tokens[at:]]


def shown(decoder: TextDecoder, pieces: Iterable[tuple[int, ...]]) -> str:
    return "".join(decoder.push(piece) for piece in pieces) + decoder.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_token_by_token(text: str) -> None:
    tokens = TEXT.encode(text)
    assert shown(TEXT.decoder(), [(token,) for token in tokens]) == text


@given(text=st.text(max_size=60), sizes=st.lists(st.integers(0, 9), max_size=30))
def test_a_text_comes_back_in_any_pieces(text: str, sizes: list[int]) -> None:
    assert shown(TEXT.decoder(), cut(TEXT.encode(text), sizes)) == text


@given(tokens=st.lists(st.integers(1, 4095), max_size=40), sizes=st.lists(st.integers(0, 5), max_size=40))
def test_any_tokens_give_the_text_of_decoding_them_at_once(tokens: list[int], sizes: list[int]) -> None:
    """Also tokens that are no valid UTF-8 together, which a model with random weights writes."""
    whole = LIBRARY.decode(tokens, skip_special_tokens=False)
    assert shown(TEXT.decoder(), cut(tuple(tokens), sizes)) == whole


@given(words=st.lists(st.sampled_from("abc"), min_size=1, max_size=30), sizes=st.lists(st.integers(0, 4), max_size=20))
def test_a_tokenizer_that_writes_the_first_word_otherwise(words: list[str], sizes: list[int]) -> None:
    """Llama's and Gemma's take the space off the first word only: a piece is no first word."""
    tokenizer = Tokenizer(models.WordLevel({f"\u2581{word}": i for i, word in enumerate("abc")}, unk_token="\u2581a"))
    tokenizer.decoder = decoders.Metaspace()
    tokens = tuple("abc".index(word) for word in words)
    assert shown(TextDecoder(tokenizer, set()), cut(tokens, sizes)) == " ".join(words)


def test_half_a_character_is_held_back() -> None:
    tokens = TEXT.encode("🙂")
    assert len(tokens) > 1
    decoder = TEXT.decoder()
    assert [decoder.push((token,)) for token in tokens] == [""] * (len(tokens) - 1) + ["🙂"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    decoder = TEXT.decoder()
    first = TEXT.encode("🙂")[:2]
    assert decoder.push(TEXT.encode("ab") + first) == ""
    assert decoder.finish().startswith("ab\ufffd")


def test_special_tokens_are_hidden() -> None:
    decoder = TEXT.decoder()
    assert decoder.push((END, *TEXT.encode("ab"), END)) == "ab"
    assert decoder.push((END,)) == ""
    assert decoder.push(TEXT.encode("c")) + decoder.finish() == "c"


def copy_model(folder: Path, *, tokenizer: dict[str, Any] | None = None, config: Any = None) -> TextModel:
    """The bundled tokenizer with parts replaced; `config` None leaves tokenizer_config.json out."""
    folder.mkdir(exist_ok=True)
    if tokenizer is None:
        shutil.copy(BUNDLED / "tokenizer.json", folder)
    else:
        changed = {**json.loads((BUNDLED / "tokenizer.json").read_text("utf-8")), **tokenizer}
        (folder / "tokenizer.json").write_text(json.dumps(changed))
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "tokenizer_config.json").write_text(text)
    return TextModel(folder)


def test_added_tokens_that_are_not_special_are_text(tmp_path: Path) -> None:
    """Many tokenizers add runs of spaces or marks like <think> this way: hiding them would change the answer."""
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": END, "content": "<|endoftext|>", "special": True, **entry},
        {"id": 4096, "content": "<think>", "special": False, **entry},
    ]
    text = copy_model(tmp_path, tokenizer={"added_tokens": added})
    assert 4096 in text.encode("a<think>b")
    assert shown(text.decoder(), [(*text.encode("a<think>b"), END)]) == "a<think>b"


def test_a_prompt_is_never_truncated_or_padded(tmp_path: Path) -> None:
    limits = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    }
    text = copy_model(tmp_path, tokenizer=limits)
    prompt = "def f(x):\n    return x + 1\n"
    assert text.encode(prompt) == TEXT.encode(prompt)


# ---- chat templates ---------------------------------------------------------------------------------------


def test_no_token_stands_for_more_bytes_than_the_tokenizer_says() -> None:
    longest = max(len(LIBRARY.decode([token], skip_special_tokens=False).encode()) for token in range(TEXT.vocabulary))
    assert longest <= TEXT.most_bytes_per_token < 4 * longest


def test_a_tokenizer_that_composes_characters_may_make_less_of_bytes(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    plain = TextModel(tmp_path).most_bytes_per_token
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    composing = TextModel(tmp_path)
    hangul = "\u1112\u1161\u11ab" * 30  # nine bytes for each syllable of three
    wide = "\U0001d41a" * 100  # a bold letter of four bytes for each of one
    for text in (hangul, wide):
        assert len(text.encode()) <= composing.most_bytes_per_token * len(composing.encode(text))
    assert composing.most_bytes_per_token > plain


@pytest.mark.parametrize("chat", [False, True])
def test_what_is_far_too_long_shows_at_its_beginning(chat: bool) -> None:
    def encode(text: str, most: int) -> tuple[int, ...]:
        return TEXT.encode_chat([{"role": "user", "content": text}], most) if chat else TEXT.encode(text, most)

    field = "messages" if chat else "prompt"
    with pytest.raises(
        PromptError, match=rf"^{field}: \d+ tokens in the first 800 of \d+ characters are too long; this"
    ):
        encode("def f(x): return x + 1\n" * 1000, 100)
    blank = " " * 5000  # of many characters and few tokens
    assert len(encode(blank, 300)) < 300


def test_other_threads_run_while_a_long_prompt_is_encoded() -> None:
    text, prompt = TextModel(BUNDLED), "for each in range(100): print(each)\n" * 20_000

    def pieces() -> int:
        """Pieces of work (0.1 ms) that this thread gets done meanwhile: thousands, or as many as fit into the few
        milliseconds that a thread waits for its turn."""
        begun, count = Event(), 0

        def encode() -> None:
            begun.set()
            text.encode(prompt)

        thread = Thread(target=encode)
        thread.start()
        begun.wait()
        while thread.is_alive():
            sum(range(10_000))
            count += 1
        return count

    assert any(pieces() > 400 for _ in range(5))


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_the_bundled_template_makes_comments_and_code() -> None:
    expected = "# Add two\n# numbers.\ndef add(a, b): ...\n\n# And now?\n"
    tokens = TEXT.encode_chat(turns("Add two\nnumbers.", "def add(a, b): ...", "And now?"))
    assert tokens == (END, *TEXT.encode(expected))


def test_the_bundled_template_of_prose_makes_a_talk_of_two() -> None:
    prose = TextModel(BUNDLED_MODELS["bundled-prose"])
    expected = '"How do you do?"\n\n"Very well," said she.\n\n"And your sister?"\n\n"'
    tokens = prose.encode_chat(turns("How do you do?", 'Very well," said she.', "And your sister?"))
    assert tokens == (END, *prose.encode(expected))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    text = copy_model(tmp_path)
    with pytest.raises(PromptError, match=r"^messages: .*no chat template.*`prompt`"):
        text.encode_chat(turns("hello"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\n alternate') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_raises_is_one_line_that_names_the_field(tmp_path: Path, template: str) -> None:
    text = copy_model(tmp_path, config={"chat_template": template})
    with pytest.raises(PromptError, match=r"^messages: the model's chat template refuses them: .") as caught:
        text.encode_chat(turns("hello"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<|endoftext|>"}},
        {"chat_template": [{"name": "tool", "template": "no"}, {"name": "default", "template": "<|endoftext|>hi"}]},
        {"chat_template": "<|endoftext|>{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"},
        {"chat_template": "{% if tools is none %}<|endoftext|>hi{% endif %}"},
        {"chat_template": "<|endoftext|>{% if add_generation_prompt %}hi{% endif %}"},
    ],
)
def test_templates_as_they_are_found(tmp_path: Path, config: dict[str, Any]) -> None:
    text = copy_model(tmp_path, config=config)
    assert text.encode_chat(turns("hi", "ho")) == (END, *TEXT.encode("hi"))


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}hi")
    text = copy_model(tmp_path, config={"eos_token": "<|endoftext|>"})
    assert text.encode_chat(turns("x")) == (END, *TEXT.encode("hi"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "tokenizer_config.json"),
        ("[]", "tokenizer_config.json"),
        ({"chat_template": "{% for %}"}, "chat template"),
    ],
)
def test_settings_that_cannot_be_read_are_the_models_fault(tmp_path: Path, config: object, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        copy_model(tmp_path / "broken", config=config)


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_broken_tokenizer_is_the_models_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        TextModel(tmp_path)


# ---- stop strings -----------------------------------------------------------------------------------------


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Read the text letter by letter; cut before the longest stop string that a letter completes."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def found(pieces: Iterable[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    return "".join([finder.push(piece) for piece in pieces]) + finder.finish(), finder.found


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one two"], ("two",), ("one ", True)),
        (["one t", "w", "o"], ("two",), ("one ", True)),
        (["one t", "w", "i"], ("two",), ("one twi", False)),
        (["aab"], ("ab",), ("a", True)),
        (["a", "a", "a", "b"], ("aab",), ("a", True)),
        (["abc"], ("bc", "abc"), ("", True)),
        (["a", "bc"], ("bc", "abc"), ("", True)),
        (["abc"], ("abc", "b"), ("a", True)),
        (["a", "b", "c"], ("abc", "b"), ("a", True)),
        (["", "x", ""], ("xx",), ("x", False)),
        (["stop", "stop"], ("stop",), ("", True)),
        (["🙂", "\n\n", "x"], ("\n\n",), ("🙂", True)),
        (["anything"], (), ("anything", False)),
    ],
)
def test_stops(pieces: list[str], stops: tuple[str, ...], expected: tuple[str, bool]) -> None:
    assert found(pieces, stops) == expected


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(tuple),
)
def test_stops_do_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert found(pieces, stops) == naive("".join(pieces), stops)


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=8), stop=st.text("ab", min_size=2, max_size=4))
def test_no_more_is_held_back_than_a_stop_string_needs(pieces: list[str], stop: str) -> None:
    finder = StopFinder((stop,))
    got = fed = 0
    for piece in pieces:
        got, fed = got + len(finder.push(piece)), fed + len(piece)
        if finder.found:
            return
        assert fed - got < len(stop)
