"""Two codecs judged on the same items: the mean difference and its standard error. What makes an
item hard is common to both and falls out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean over pairs and its standard error, as if no pair knew of another."""

    mean: float
    standard_error: float


def difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """`one` minus `other`, pair by pair; two pairs or more."""
    if one.shape != other.shape or one.dim() != 1 or len(one) < 2:
        raise ValueError(f"pairs of shapes {tuple(one.shape)} and {tuple(other.shape)} have no standard error")
    apart = one.double() - other.double()
    return Difference(float(apart.mean()), float(apart.std()) / math.sqrt(len(apart)))
