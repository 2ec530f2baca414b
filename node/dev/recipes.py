"""What the bundled models are made of: texts, words, geometry, schedule and what their cards say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from transformers import LlamaConfig

from ..bundled.evaluate import CONTEXT, HELD_OUT, held_out_sources, stdlib_root
from .novels import read_novels, split_chapters

# Generated tables teach nothing about Python and would be a tenth of all tokens.
SKIPPED_FOLDERS: Final = {"site-packages", "encodings", "__pycache__"}
LIBRARY_WEIGHT: Final = 2.0  # how often library text is drawn, relative to the test-suite's


@dataclass(frozen=True, slots=True)
class Corpora:
    """Texts to train on, in groups with the weight that each token of one is drawn with; and those held out, by name."""

    groups: tuple[tuple[float, list[str]], ...]
    held_out: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSchedule:
    """The figures that decide a training, beside texts and geometry."""

    tokens: int = 30_000_000
    batch_tokens: int = 8192
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.3
    middle_from: float = 0.55
    long_from: float = 0.86
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    dropout: float = 0.0  # of what attention and MLP add to the residual stream
    seed: int = 0

    def learning_rate(self, tokens: int) -> float:
        """Factor on the peak rates after `tokens`: linear warm-up, flat, linear decay to zero."""
        done = tokens / self.tokens
        if done < self.warmup_fraction:
            return (done + 1e-4) / self.warmup_fraction
        return min(1.0, max(0.0, (1.0 - done) / self.decay_fraction))

    def context(self, tokens: int) -> int:
        """Sequence length after `tokens`: attention is most of a long window's price, so long ones come last."""
        done = tokens / self.tokens
        return 256 if done < self.middle_from else 512 if done < self.long_from else CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Of a Llama with tied embeddings."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int

    def config(self) -> LlamaConfig:
        """As transformers takes it."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            dtype="bfloat16",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTexts:
    """What a model's card says that is not measured; `data` may name the Python that it was trained with."""

    title: str
    continues: str
    chat: str
    data: str
    training: str = ""
    held_out: str
    part: str  # what one of the held-out texts is called
    training_options: str = ""
    evaluation_options: str = ""
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One bundled model. `words` splits text before byte pairs are merged; `read` finds the texts, from the folder
    that was given with --corpus."""

    name: str
    geometry: Geometry
    words: str
    chat_template: str
    read: Callable[[Path | None], Corpora]
    schedule: TrainingSchedule = field(default_factory=TrainingSchedule)
    prompts: tuple[str, ...] = ()
    """Beginnings that the card shows with what the model makes of them."""
    ships_held_out: bool = False
    """Whether its held-out texts are part of its folder: they are not on every machine."""
    card: CardTexts


def read_stdlib(folder: Path | None = None) -> Corpora:
    """The running interpreter's standard library and its tests, in two groups."""
    groups: dict[bool, list[str]] = {False: [], True: []}
    for is_test, text in _stdlib_sources(folder or stdlib_root()):
        groups[is_test].append(text)
    return Corpora(((LIBRARY_WEIGHT, groups[False]), (1.0, groups[True])), held_out_sources())


def _stdlib_sources(root: Path) -> Iterator[tuple[bool, str]]:
    """Yield `(is_test, text)` for each module that is not held out; nor its tests, which quote it."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or any(
            path.stem == name or path.stem.startswith(f"test_{name}") for name in HELD_OUT
        ):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # the test-suite holds files in other encodings on purpose
            continue
        if text.strip():
            yield bool({"test", "tests"}.intersection(relative.parts)), text


def read_austen(folder: Path | None) -> Corpora:
    """Six novels by chapters, without the one in the middle of each. Raises ValueError."""
    if folder is None:
        raise ValueError("corpus: give the folder `data` of R's package janeaustenr")
    chapters: list[str] = []
    held_out: dict[str, str] = {}
    for name, novel in sorted(read_novels(folder).items()):
        kept, held_out[name] = split_chapters(novel)
        chapters += kept
    return Corpora(((1.0, chapters),), held_out)


CODE: Final = Recipe(
    name="bundled",
    geometry=Geometry(layers=8, width=256, heads=4, kv_heads=2, head_dim=64, mlp_width=768, vocabulary=4096),
    # Runs of blanks before a word stay one piece, so that indentation costs one token.
    words=r"\n+[ \t]*|[ \t]+(?=[ \t])| ?[A-Za-z_]+|\d{1,3}| ?[^\sA-Za-z_0-9]+|\s+",
    # The model is not instruction-tuned: a chat becomes what it knows, a commented Python file.
    chat_template=(
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}{{ message['content'] }}\n\n"
        "{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}"
        "{% endfor %}"
    ),
    read=read_stdlib,
    card=CardTexts(
        title="The bundled model",
        continues="Python source",
        chat="a commented Python file",
        data="the standard library of Python {python}, its test-suite included",
        held_out=f"{', '.join(f'`{name}`' for name in HELD_OUT)}, and their own tests",
        part="module",
        licence=("Python's standard library, from which they were trained, is under the\nPSF licence version 2."),
    ),
)

PROSE: Final = Recipe(
    name="bundled-prose",
    geometry=Geometry(layers=6, width=224, heads=8, kv_heads=4, head_dim=32, mlp_width=608, vocabulary=2048),
    words=r"\n+|'(?:s|d|ll|re|ve|t|m)\b| ?[A-Za-z]+|\d{1,3}|--| ?[^\sA-Za-z0-9]+|\s+",
    # Nor is this one: a chat becomes the talk of two people in a novel.
    chat_template=(
        "{{ bos_token }}{% for message in messages %}"
        "\"{{ message['content'] }}{{ '\n\n' if message['role'] == 'assistant' else '\"\n\n' }}"
        '{% endfor %}{% if add_generation_prompt %}"{% endif %}'
    ),
    read=read_austen,
    ships_held_out=True,
    schedule=TrainingSchedule(tokens=4_000_000, decay_fraction=0.25, middle_from=0.65, long_from=0.93, dropout=0.1),
    prompts=(
        "It was a fine morning in June, and Mrs. Bennet",
        "Mr. Knightley came into the room, and",
        '"My dear Miss Elliot," said he,',
    ),
    card=CardTexts(
        title="The bundled model of prose",
        continues="English novels of two centuries ago",
        chat="the talk of two people in a novel",
        data="six novels of Jane Austen as R's package `janeaustenr` 1.0.0 ships them, 1.1 M tokens",
        training=", resumed four times; planned for more until 3.2 M were seen",
        held_out="the chapter in the middle of each, in `held_out`",
        part="novel",
        training_options=" bundled-prose --corpus DATA",
        evaluation_options=" --model bundled-prose",
        licence=(
            "The novels (1811 to 1818) are in the public domain; the\npackage that ships them is under the MIT licence. "
            "DATA is what Debian's package `r-cran-janeaustenr` installs as\n"
            "`/usr/lib/R/site-library/janeaustenr/data`; `dpkg -x` unpacks it without R."
        ),
    ),
)

RECIPES: Final = {recipe.name: recipe for recipe in (CODE, PROSE)}
