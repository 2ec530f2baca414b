"""Which boxes host which services of the catalogue, among those boxes that take whatever they are given.

    assigner = Assigner()
    found = assigner.assign(entries, boxes, brought, now)     # node -> the name of an entry
    assigner.place(assign_slots(...), now)                    # where services are to come to, by `replacing.py`

Every service that can be placed gets as many boxes as hold its model once; the others go by weight and by what
clients ask for. What a box hosts it keeps, unless a service is without one, or far poorer than the one that it serves.
The second node of a box that may host several is given to a service that has no box at all, and otherwise by a
placement. No node leaves a service for a placement's sake that no other one serves. Pure: time is a parameter. The same
boxes and the same past give the same answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Final, final

import msgspec

from .catalogue import CatalogueEntry
from .hosting import NOTHING, Brought, HostingBox

MOVE_GAIN: Final = 1.5
"""A box moves where its service stays so many times as rich as the other one was before. Higher: fewer moves."""

REST_S: Final = 600.0
"""A box that was given a service keeps it for so long, unless another one has no box at all. Longer: fewer moves;
shorter: boxes follow what clients ask for sooner."""

AWAY_S: Final = 45.0
"""A box that is away counts for so long as if it were here: it leaves for a moment to come back with another model.
Shorter: a service whose only box is lost gets another one sooner."""

LATE_S: Final = 1800.0
"""A box that has not served for so long what it was given counts for nothing: others are given it, too. Longer: slow
downloads come to their end; shorter: a service whose box does not get on is served sooner."""

FORGET_S: Final = 1800.0
"""For so long a box that is away is given the service that it had, when it comes back: its files are there."""

SETTLED_S: Final = 10.0
"""A service is served elsewhere when a box has been ready for so long: plans have it by then, and gateways know them.
Longer: safer on slow links; shorter: services are placed anew sooner."""

SILENT_S: Final = 600.0
"""A box that does not serve what it was given, and has shown nothing new for so long, holds up no placement and has a
part in none. Longer: engines that load in silence come to their end; shorter: services follow what is asked sooner."""

FAILURES: Final = 2
"""So does one whose engine has failed so often in a row. Fewer: what fails once is placed elsewhere."""

STUCK_S: Final = 120.0
"""After so long services may be placed anew though they have not come to where they were placed last: none of two nodes
goes first where each serves alone what the other is to. Shorter: than moves take, and they would be begun in vain."""


@final
class _Draft:
    """Which box is to host what, while it is decided. `targets`: how much each entry is to have, beside the others."""

    def __init__(
        self,
        boxes: Iterable[HostingBox],
        targets: Mapping[str, float],
        brought: Mapping[str, Brought],
        late: frozenset[str],
    ) -> None:
        self.boxes = {box.id: box for box in boxes}
        self.targets = targets
        self.given: dict[str, str] = {}  # box -> entry
        self._late = late  # boxes that count for nothing
        self._placed = {name for name, each in brought.items() if each.is_placed}
        self._members: dict[str, dict[str, None]] = {name: {} for name in targets}
        self._power = {name: brought.get(name, NOTHING).power for name in targets}
        self._fits = {name: brought.get(name, NOTHING).fits for name in targets}  # layers that its boxes hold together
        self._layers = dict.fromkeys(targets, 0)
        for box in self.boxes.values():
            for name, model in box.offer.models.items():
                if name in targets and model.is_possible:
                    self._layers[name] = max(self._layers[name], model.layers)

    def give(self, box: HostingBox, name: str) -> None:
        """A box without an entry is to host this one."""
        self.given[box.id] = name
        self._members[name][box.id] = None
        if box.id not in self._late:
            self._power[name] += box.power
            self._fits[name] += box.fits(name)

    def take(self, box: HostingBox) -> None:
        """A box is to host nothing."""
        name = self.given.pop(box.id)
        del self._members[name][box.id]
        if box.id not in self._late:
            self._power[name] -= box.power
            self._fits[name] -= box.fits(name)

    def beside(self, box: HostingBox) -> set[str]:
        """What the other nodes of a box have been given, and what they host until they have left it."""
        others = [self.boxes[each] for each in box.beside if each != box.id and each in self.boxes]
        found = {name for other in others for name in (self.given.get(other.id, ""), other.offer.hosts)}
        return found - {""}

    def fits(self, box: HostingBox, name: str) -> int:
        """How many layers of an entry's model a box has room for beside what its other nodes have."""
        beside = self.beside(box)
        if not beside:
            return box.fits(name)
        return box.fits(name) if name not in beside and box.has_room_for({*beside, name}) else 0

    def of(self, name: str) -> list[HostingBox]:
        """The boxes of an entry."""
        return [self.boxes[box] for box in self._members[name]]

    def layers_of(self, name: str) -> int:
        """How many layers an entry's boxes hold together."""
        return self._fits[name]

    def holds(self, name: str, layers: int) -> bool:
        """Whether so many layers are all of an entry's model."""
        return 0 < self._layers[name] <= layers

    def is_placed(self, name: str, without: HostingBox | None = None) -> bool:
        """Whether an entry's boxes, but for one, hold its model at least once."""
        less = without.fits(name) if without is not None and without.id not in self._late else 0
        return name in self._placed or self.holds(name, self._fits[name] - less)

    def richness(self, name: str, more: float = 0.0) -> float:
        """What an entry has, with so much more, beside what it is to have."""
        return (self._power[name] + more) / self.targets[name]

    def free(self) -> list[HostingBox]:
        """Boxes without an entry, the strongest first."""
        found = (box for box in self.boxes.values() if box.id not in self.given and box.id not in self._late)
        return sorted(found, key=lambda box: (-box.power, box.id))

    def unused(self, name: str) -> list[HostingBox]:
        """A free node of each box that has nothing at all, and room for layers of an entry."""
        found = {box.machine: box for box in reversed(self.free()) if box.fits(name) and not self.beside(box)}
        return list(reversed(found.values()))

    def spare(self) -> list[HostingBox]:
        """Boxes that their entries can do without, those of the richest first."""
        sure = ((self.boxes[box], name) for box, name in self.given.items() if box not in self._late)
        found = [box for box, name in sure if self.is_placed(name, box)]
        return sorted(found, key=lambda box: (-self.richness(self.given[box.id]), box.power, box.id))


@final
class Assigner:
    """One per coordinator. It remembers what it has given to whom, and since when."""

    def __init__(self) -> None:
        self._wanted: Mapping[str, str] = {}  # what nodes are to come to, as services have been placed last
        self._wanted_at = 0.0
        self._given: dict[str, tuple[str, float]] = {}  # box -> entry, since
        self._seen: dict[str, float] = {}
        self._boxes: dict[str, HostingBox] = {}  # as they were seen last
        self._good_at: dict[str, float] = {}  # when each was given something, came back, or was seen to serve it
        self._serves: dict[str, tuple[str, float]] = {}  # node -> the entry for which it is ready, since
        self._shows: dict[str, tuple[str, float]] = {}  # node -> what it says of how far it is, since

    def __repr__(self) -> str:
        return f"<Assigner {len(self._given)} boxes>"

    def recall(self, hosts: Mapping[str, Iterable[str]], now: float) -> None:
        """This is what another coordinator has given, by entry: what is not known better here."""
        for name, boxes in hosts.items():
            for box in boxes:
                self._given.setdefault(box, (name, now))
                self._seen.setdefault(box, now)

    def assign(
        self,
        entries: Sequence[CatalogueEntry],
        boxes: Sequence[HostingBox],
        brought: Mapping[str, Brought],
        now: float,
    ) -> dict[str, str]:
        """The entry of each node that is to have one, at `now` (seconds)."""
        self._serves = _keep_since(self._serves, {box.id: box.serves for box in boxes if box.serves}, now)
        self._shows = _keep_since(self._shows, {box.id: box.shows for box in boxes}, now)
        boxes = _keep_agreed(self._see(boxes, now))
        draft = _Draft(boxes, _weigh(entries, boxes, brought), brought, self._find_late(boxes, now))
        for box in boxes:
            # What the box has counts where nothing was given here: an earlier coordinator's word, or its own start.
            name = self._given[box.id][0] if box.id in self._given else ""
            name = name or (box.offer.hosts if box.id not in self._wanted else "")
            if name in draft.targets and box.fits(name):
                draft.give(box, name)
        _place_all(entries, draft)
        self._follow(draft, {name for name, each in brought.items() if each.is_served}, now)
        _share_rest(draft, {node for node, name in self._wanted.items() if not name or name in draft.targets})
        self._move_one(draft, now)
        self._note(draft, now)
        return dict(sorted(draft.given.items()))

    def _find_late(self, boxes: Iterable[HostingBox], now: float) -> frozenset[str]:
        """Boxes that were given something long ago and do not serve it."""
        for box in boxes:
            if box.serves is None or box.serves == self._given.get(box.id, ("", 0.0))[0]:
                self._good_at[box.id] = now
        return frozenset(box.id for box in boxes if now - self._good_at.setdefault(box.id, now) > LATE_S)

    def _see(self, boxes: Sequence[HostingBox], now: float) -> list[HostingBox]:
        """These, and those that are away for a moment."""
        here = {box.id: box for box in boxes}
        back = [id_ for id_ in here if now - self._seen.get(id_, now) > AWAY_S]
        self._good_at.update(dict.fromkeys(back, now))
        self._seen.update(dict.fromkeys(here, now))
        self._boxes.update(here)
        away = [box for id_, box in self._boxes.items() if id_ not in here and now - self._seen[id_] <= AWAY_S]
        return [*boxes, *(box for box in away if box.id in self._given)]

    def given(self) -> dict[str, str]:
        """What each node was given."""
        return {box: name for box, (name, _) in self._given.items()}

    def place(self, wanted: Mapping[str, str], now: float) -> None:
        """Nodes are to come to these entries, or to none (""); until then nothing else is placed."""
        self._wanted, self._wanted_at = wanted, now

    @property
    def idle(self) -> tuple[str, ...]:
        """Nodes that are to let go of what they host, and have not yet."""
        let_go = (node for node, name in sorted(self._wanted.items()) if not name and node not in self._given)
        return tuple(node for node in let_go if node in self._boxes and self._boxes[node].offer.hosts)

    @property
    def is_in_place(self) -> bool:
        """Whether nodes have been given all that they are to come to, and serve it."""
        given, here = self.given(), self._boxes
        return all(
            name == given.get(node, "") == self._serves.get(node, ("",))[0]
            for node, name in self._wanted.items()
            if node in here
        )

    def is_settled(self, now: float) -> bool:
        """Whether services may be placed anew: every node serves what it was given, but for those that do not get on,
        and has come to what it was to come to, where that was possible."""
        if not self.is_in_place and now - self._wanted_at <= STUCK_S:
            return False
        here = {box: name for box, (name, _) in self._given.items() if now - self._seen.get(box, now) <= AWAY_S}
        stuck = self.find_stuck(now)
        return all(box in stuck or self._serves.get(box, ("",))[0] == name for box, name in here.items())

    def find_stuck(self, now: float) -> dict[str, str]:
        """By node that does not serve what it was given, and does not get on: what it was given."""
        late = self._find_late(self._boxes.values(), now)
        waiting = {box: given for box, given in self._given.items() if self._serves.get(box, ("",))[0] != given[0]}
        return {
            box: name
            for box, (name, since) in waiting.items()
            if box in late
            or (box in self._boxes and self._boxes[box].failures >= FAILURES)
            or now - max(since, self._shows.get(box, ("", now))[1]) > SILENT_S
        }

    def _follow(self, draft: _Draft, brought: Collection[str], now: float) -> None:
        """Nodes to what they are to come to. One that serves something leaves it when it is served elsewhere, by one
        that stays; one that is to have nothing, when the others of its box are ready, too."""
        for id_, name in sorted(self._wanted.items()):
            box, before = draft.boxes.get(id_), draft.given.get(id_, "")
            if box is None or name == before or (name and name not in draft.targets):
                continue
            if before and before not in brought and not self._is_served(draft, before, id_, now):
                continue
            if not name and not all(self._is_ready(draft, each, now) for each in box.beside if each != id_):
                continue
            if before:
                draft.take(box)
            if name and draft.fits(box, name) and box.is_whole(name):
                draft.give(box, name)
            elif name and before:
                draft.give(box, before)

    def _is_served(self, draft: _Draft, name: str, without: str, now: float) -> bool:
        """Whether a node that is to keep an entry has been ready for it for a while, one aside."""
        others = (box.id for box in draft.of(name) if box.id != without)
        return any(self._wanted.get(each, name) == name and self._is_ready(draft, each, now) for each in others)

    def _is_ready(self, draft: _Draft, node: str, now: float) -> bool:
        """Whether a node has served for a while what it was given, if anything."""
        name, (serves, since) = draft.given.get(node, ""), self._serves.get(node, ("", now))
        return not name or (serves == name and now - since >= SETTLED_S)

    def _move_one(self, draft: _Draft, now: float) -> None:
        """One box from a rich service to a poor one, where the rich one stays well ahead of what the poor one had."""
        for box in draft.spare():
            before = draft.given[box.id]
            if box.id in self._wanted or now - self._given.get(box.id, ("", now))[1] < REST_S:
                continue
            others = [name for name in draft.targets if name != before and box.is_whole(name) and draft.fits(box, name)]
            poorest = min(others, key=lambda name: (draft.richness(name), name), default="")
            if poorest and draft.richness(poorest) * MOVE_GAIN <= draft.richness(before, -box.power):
                draft.take(box)
                draft.give(box, poorest)
                return

    def _note(self, draft: _Draft, now: float) -> None:
        for box, name in draft.given.items():
            if self._given.get(box, ("", 0.0))[0] != name:
                self._given[box] = name, now
                self._good_at[box] = now
        gone = [box for box, at in self._seen.items() if now - at > FORGET_S]
        idle = [box for box in draft.boxes if box not in draft.given]
        for box in (*gone, *idle):
            self._given.pop(box, None)
        for box in gone:
            del self._seen[box]
            self._boxes.pop(box, None)
            self._good_at.pop(box, None)


def _keep_since(
    before: Mapping[str, tuple[str, float]], here: Mapping[str, str], now: float
) -> dict[str, tuple[str, float]]:
    """By node its text, and since when it has been that."""
    return {id_: old if (old := before.get(id_, ("", now)))[0] == text else (text, now) for id_, text in here.items()}


def _keep_agreed(boxes: Sequence[HostingBox]) -> list[HostingBox]:
    """The boxes with what they say of models that have as many layers as most say: one that lies, or has other files,
    hosts nothing by that, and keeps nobody else from it."""
    told: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for box in boxes:
        for name, model in box.offer.models.items():
            if model.is_possible:
                told[name][model.layers] += 1
    agreed = {name: max(counts, key=lambda layers: (counts[layers], -layers)) for name, counts in told.items()}
    found = []
    for box in boxes:
        models = {name: model for name, model in box.offer.models.items() if model.layers == agreed.get(name)}
        found.append(replace(box, offer=msgspec.structs.replace(box.offer, models=models)))
    return found


def _weigh(
    entries: Iterable[CatalogueEntry], boxes: Iterable[HostingBox], brought: Mapping[str, Brought]
) -> dict[str, float]:
    """How much each entry is to have, beside the others: its weight, and up to as many times more as there are entries
    where clients ask for it alone. What a token costs goes by the weights that it is multiplied with."""
    listed = {entry.name: entry.weight for entry in entries}
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for box in boxes:
        for name, model in box.offer.models.items():
            sizes[name].append(model.weight_bytes)
    work = {name: brought.get(name, NOTHING).tokens_s * median_low(sizes[name] or (0,)) for name in listed}
    total = sum(work.values())
    return {
        name: weight * (1.0 + (len(listed) * work[name] / total if total > 0.0 else 0.0))
        for name, weight in listed.items()
    }


def _place_all(entries: Iterable[CatalogueEntry], draft: _Draft) -> None:
    """Have each entry that can be placed be so: those first that fewest boxes can host."""
    able = {entry.name: sum(box.fits(entry.name) > 0 for box in draft.boxes.values()) for entry in entries}
    for entry in sorted(entries, key=lambda each: (able[each.name], -each.weight, each.name)):
        if draft.is_placed(entry.name):
            continue
        found = _find_group(entry.name, draft)
        for box in found:
            if box.id in draft.given:
                draft.take(box)
            draft.give(box, entry.name)
        if not found:  # a part that serves nobody is of no use
            for box in draft.of(entry.name):
                draft.take(box)


def _find_group(name: str, draft: _Draft) -> list[HostingBox]:
    """Boxes that would hold an entry's model, with those that it has: free ones, then such as others can do without;
    one that holds all of it before several. None where there are not enough."""
    for choice in (draft.free(), draft.spare()):
        alone = [box for box in choice if box.is_whole(name) and draft.fits(box, name)]
        if alone:  # the weakest that is strong enough, and has nothing else: stronger ones are for what needs them
            return [min(alone, key=lambda box: (bool(draft.beside(box)), box.power, box.missing(name), box.id))]
    found, layers = list[HostingBox](), draft.layers_of(name)
    for box in draft.unused(name):
        found.append(box)
        layers += box.fits(name)
        if draft.holds(name, layers):
            return found
    taken = list[tuple[HostingBox, str]]()
    while not draft.holds(name, layers):
        # One by one: each may be the last that its entry can do without.
        spare = [
            box for box in draft.spare() if box.fits(name) and draft.given[box.id] != name and not draft.beside(box)
        ]
        if not spare:
            break
        taken.append((spare[0], draft.given[spare[0].id]))
        draft.take(spare[0])
        layers += spare[0].fits(name)
    for box, before in taken:  # whoever asks gives them
        draft.give(box, before)
    return [*found, *(box for box, _ in taken)] if draft.holds(name, layers) else []


def _share_rest(draft: _Draft, wanted: Collection[str]) -> None:
    """Give each box that has nothing to the service that is poorest of those that it holds alone; several that hold one
    together, to that. Those that are placed otherwise wait for that."""
    for box in draft.free():
        whole = [name for name in draft.targets if box.is_whole(name)]
        if whole and box.id not in wanted and not draft.beside(box):
            draft.give(box, min(whole, key=lambda name: (draft.richness(name, box.power), box.missing(name), name)))
    for name in sorted(draft.targets, key=lambda name: (draft.richness(name), name)):
        parts, layers = list[HostingBox](), 0
        for box in draft.unused(name):
            if box.id not in wanted and not draft.holds(name, layers):
                parts.append(box)
                layers += box.fits(name)
        if draft.holds(name, layers):
            for box in parts:
                draft.give(box, name)
