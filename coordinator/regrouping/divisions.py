"""Machines whose GPUs several nodes share: what those nodes tell of it, and what is believed.

The owner of such a machine may let the network choose among several cuts (`join --replicas auto`). Its first node, the
head, then tells which nodes there are and which cuts may be; the others name the head. Both must agree: so nobody can
have others' nodes restarted, nor count as a part of another's machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from ..bounds import MAX_CUTS, MAX_GPUS, Count, Degree, Name, Text


class CutOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A cut that a machine can take: so many nodes that hold the model, with `tp` GPUs each that share each layer, and
    requests of up to `longest` tokens."""

    replicas: Degree
    tp: Degree
    longest: Count


class BoxDivision(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells of the machine that it shares. The head alone tells the rest: the `nodes` of now with itself,
    in the order of their GPUs; which cuts its owner `offers`; and the last one that it could not take, and `why`: so
    many nodes, 0 where there is none."""

    head: Name
    nodes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_GPUS)] = ()
    offers: Annotated[tuple[CutOffer, ...], msgspec.Meta(max_length=MAX_CUTS)] = ()
    refused: Annotated[int, msgspec.Meta(ge=0, le=MAX_GPUS)] = 0
    why: Text = ""

    def offer(self, replicas: int) -> CutOffer | None:
        """The cut of so many nodes, where its owner offers it."""
        return next((each for each in self.offers if each.replicas == replicas), None)


def find_divided(told: Mapping[str, BoxDivision]) -> dict[str, BoxDivision]:
    """By head, the machines that may be divided anew, from what each node says: all of a machine's nodes are here and
    agree."""
    return {
        peer: division
        for peer, division in told.items()
        if division.head == peer
        and division.offers
        and peer in division.nodes
        and len(division.nodes) == len(set(division.nodes))
        and all(node in told and told[node].head == peer for node in division.nodes)
    }
