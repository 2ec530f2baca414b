"""What the search for a plan can be told: how long, how wide, how hot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """The knobs of `search`. A step is one evaluation or one upper bound; CPU time grows with
    steps. Defaults are what eight to forty seeds of the bench were best with (docs/planner.md).

    How long, and in which parts:

    - `steps`: at most so many, whatever the size of the cluster; None for the two below.
    - `steps_per_gpu`, `least_steps`: by default so many for each GPU, and so many at least. From
      400 to 600 steps, the share of seeds within 1 % of the best rises from 78 to 88 %
      (conversations); from 400 to 700 the median of five for coding from 0.984 to 0.994.
    - `cell_gpus`: clusters with more than twice as many GPUs are searched in cells of up to this
      size. Larger cells find plans that cross more boxes, and need more steps each.
    - `first_pass`: the share of a cell's steps that only finds out what the cell can carry.

    Where it starts:

    - `packings`: starts by `Packing`, all but the first with values off by about `packing_noise`
      (relative), so that they differ. More starts leave fewer steps for each.
    - `phase_cuts`: places tried where replicas, ordered by what their cards are good at, change
      from prefill to decode.

    Tabu search (`tabu`), in rounds:

    - `recut_share`: of the neighbours, those made by cutting boxes anew by their columns.
    - `tabu_moves`: so many of the last moves may not be undone.
    - `fruitless_draws`: draws without anything new until a round ends; `stale_steps`: steps that
      lead nowhere until it ends; `barren_rounds`: rounds that see nothing new until the search
      ends.
    - `warm`, `cold`: by about how much of the objective a step may be worse at the beginning of a
      round and at its end. Hotter rounds leave local optima sooner, and good solutions too.
    - `round_steps`: steps of a round at least, where there are so many.
    - `fresh_share`: of the rounds, those that begin at a new packing, with values off by about
      `fresh_noise`, and not at the best solution.

    Neighbours (`moves`) and columns (`packing`):

    - `whole_moves`: of the moves, those of all GPUs that a group has of a box; the others leave
      ragged groups, which meet few good neighbours.
    - `gathered_boxes`: boxes cut anew together at most; `gather_apart`: the share of those steps
      that may put the boxes in two parts; `gather_groups`: groups that a part is cut into at most.
    - `box_parts`: replicas in a box at most, unless all are of one size; `mixed_classes`: classes
      of boxes up to which two unlike boxes may share replicas. Both bound the number of columns.
    - `recut_boxes`: boxes cut anew by columns at most, with all that share replicas with them;
      `recut_noise`: by about how much their values may be off.

    The last choice:

    - `box_away`: the part of the time that a rented box is taken to be away, and with it all
      replicas that it has a part of. More prefers replicas over fewer boxes.
    """

    steps: int | None = None
    steps_per_gpu: int = 12
    least_steps: int = 700
    cell_gpus: int = 32
    first_pass: float = 0.2
    packings: int = 10
    packing_noise: float = 0.1
    phase_cuts: int = 12
    recut_share: float = 0.3
    tabu_moves: int = 24
    fruitless_draws: int = 250
    stale_steps: int = 200
    barren_rounds: int = 6
    warm: float = 1e-3
    cold: float = 2e-4
    round_steps: int = 1500
    fresh_share: float = 0.5
    fresh_noise: float = 0.2
    whole_moves: float = 0.75
    gathered_boxes: int = 5
    gather_apart: float = 0.6
    gather_groups: int = 3
    box_parts: int = 4
    mixed_classes: int = 4
    recut_boxes: int = 4
    recut_noise: float = 0.2
    box_away: float = 0.01

    def steps_for(self, gpus: int) -> int:
        """Steps of a search over so many GPUs."""
        return self.steps if self.steps is not None else max(self.least_steps, self.steps_per_gpu * gpus)
