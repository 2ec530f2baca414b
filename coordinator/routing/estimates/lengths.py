"""How long the answer to a request will be, as a guess.

Each predictor learns from the requests of its gateway that have ended. Until there are some, it
goes by Azure's conversations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from ...demand_meter import azure_lengths
from ..interface import LENGTH_PREDICTORS

SAMPLE: Final = 512
"""Latest answers that count."""

DOUBTFUL: Final = 8.0
"""Requests of about a length that weigh as much as all others together: the mean of fewer is taken
as much from the others."""

PRIOR: Final = 16
"""Answers that stand for those of a service of which nothing is known. More: it takes longer to learn how long they
are."""

BLUR: Final = 0.2
"""Lengths this close, as the logarithm of one over the other, count as nearly the same: how long an answer may be is a
guess itself."""

LONGEST: Final = 1e5
"""Tokens of the longest answer that is told from longer ones."""

_LOG_TOKENS: Final = np.linspace(0.0, np.log(LONGEST), 240)
"""Lengths for which `AnswerTail` keeps a share."""


class LengthPredictor(ABC):
    """Guesses the tokens of an answer when its request is routed."""

    @abstractmethod
    def predict(self, prompt_tokens: int, rng: np.random.Generator) -> float:
        """Tokens of the answer to such a prompt, at least 1."""

    @abstractmethod
    def record(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request has been answered in full."""


@final
class SampledLengths(LengthPredictor):
    """As in Xiong et al., section 5.2: drawn from the normal distribution with the mean and the
    deviation of a sample of answers, whatever the prompt. The sample is the latest answers."""

    def __init__(self, sample: tuple[int, ...] | None = None) -> None:
        prior = azure_lengths("conversation")[1] if sample is None else np.array(sample)
        self._outputs: deque[int] = deque(maxlen=SAMPLE)
        self._mean, self._deviation = float(prior.mean()), float(prior.std())
        self._is_stale = False

    def predict(self, prompt_tokens: int, rng: np.random.Generator) -> float:
        """See `LengthPredictor`."""
        # a few answers say little of how much answers differ
        if self._is_stale and len(self._outputs) >= DOUBTFUL:
            self._mean, self._deviation = float(np.mean(self._outputs)), float(np.std(self._outputs))
            self._is_stale = False
        return max(1.0, float(rng.normal(self._mean, self._deviation)))

    def record(self, prompt_tokens: int, output_tokens: int) -> None:
        """See `LengthPredictor`."""
        self._outputs.append(output_tokens)
        self._is_stale = True


class _LatestMean:
    """The mean of about the `SAMPLE` latest values."""

    def __init__(self, mean: float = 0.0) -> None:
        self.mean = mean
        self.count = 0

    def add(self, value: float) -> None:
        self.count = min(SAMPLE, self.count + 1)
        self.mean += (value - self.mean) / self.count


@final
class LearnedLengths(LengthPredictor):
    """The mean answer to prompts of about this length (the same power of two), as far as there were
    enough of them; else of all."""

    def __init__(self) -> None:
        self._all = _LatestMean(float(azure_lengths("conversation")[1].mean()))
        self._by_length: dict[int, _LatestMean] = {}

    def predict(self, prompt_tokens: int, rng: np.random.Generator) -> float:
        """See `LengthPredictor`; draws nothing."""
        like = self._by_length.get(prompt_tokens.bit_length())
        if like is None:
            return max(1.0, self._all.mean)
        return max(1.0, (like.count * like.mean + DOUBTFUL * self._all.mean) / (like.count + DOUBTFUL))

    def record(self, prompt_tokens: int, output_tokens: int) -> None:
        """See `LengthPredictor`."""
        self._all.add(output_tokens)
        self._by_length.setdefault(prompt_tokens.bit_length(), _LatestMean()).add(output_tokens)


@final
class AnswerTail:
    """How many answers are longer than so many tokens, by the latest ones; until there are some, by Azure's
    conversations, some of which stay until others have taken their places."""

    def __init__(self) -> None:
        prior = np.sort(azure_lengths("conversation")[1])
        self._unread: list[float] = prior[:: max(1, len(prior) // PRIOR)].tolist()
        self._recorded = 0
        self._read_after = 0
        self._curves = np.zeros((SAMPLE, len(_LOG_TOKENS)))  # of the latest answers that were read, one each
        self._curve_count = 0
        self._beyond = np.zeros(len(_LOG_TOKENS))

    def record(self, output_tokens: int) -> None:
        """A request has been answered in full."""
        self._unread.append(output_tokens)
        self._recorded += 1

    def share_beyond(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of answers that have more than so many tokens, each; of none or fewer: all."""
        if self._recorded >= self._read_after:
            # Read anew after an eighth more: a few answers change little of what hundreds say.
            self._read_after = self._recorded + max(8, min(self._recorded, SAMPLE) // 8)
            self._read()
        # The nearest of these lengths is near enough, and found many times as fast as by `np.interp`; `np.clip` takes
        # as long as all the rest.
        at = np.log(np.minimum(np.maximum(tokens, 1.0), LONGEST)) / _LOG_TOKENS[1] + 0.5
        return np.asarray(self._beyond.take(at.astype(np.intp)))

    def _read(self) -> None:
        over = (np.log(np.array(self._unread, dtype=np.float64))[:, None] - _LOG_TOKENS) / BLUR
        places = (self._curve_count + np.arange(len(over))) % SAMPLE
        self._curves[places] = 1.0 / (1.0 + np.exp(np.clip(-over, -50.0, 50.0)))
        self._curve_count += len(over)
        self._unread.clear()
        self._beyond = self._curves[: self._curve_count].mean(axis=0)


_PREDICTORS: Final[tuple[Callable[[], LengthPredictor], ...]] = (LearnedLengths, SampledLengths)


def make_predictor(name: str) -> LengthPredictor:
    """A new one, by its name among LENGTH_PREDICTORS."""
    return _PREDICTORS[LENGTH_PREDICTORS.index(name)]()
