"""What the elected coordinator does for one service: turn adverts into a plan and publish it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from ...bootstrap import PeerId
from ...coordinator import BoxView, Demand, LinkView, Plan, PlanError
from ...coordinator.capacity import KvCodec
from ...coordinator.demand import is_idle
from ...coordinator.names import name_of
from ...coordinator.plan import Regrouping
from ...coordinator.regrouping.adoption import Adoption
from ...coordinator.regrouping.divisions import BoxDivision
from ...coordinator.regrouping.steps import RegroupingProgress, RegroupProposal, make_recutting, make_regrouping
from ...coordinator.repair.damping import FlapDamping
from ...coordinator.repair.repurposing import Repurposing
from ...coordinator.repair.urgency import PlanFigures, find_traffic_news, find_urgent_news
from ...kernels.codecs import codec_named
from ..adverts import divided_boxes, parts_of
from ..settings import DEFAULT_SLO
from ..view import NetworkView
from .messages import RegroupOrder
from .set_aside import SetAside

if TYPE_CHECKING:
    from ...coordinator.network_plan import MakeTrial

Leader = tuple[PeerId, int]

MAX_LEFT_OUT: Final = 16  # boxes that a plan says it is made without; a network full of liars has no room for more
LOOK_S: Final = 0.25  # between two looks for urgent news of so many boxes; longer with more, in proportion
LOOK_BOXES: Final = 32
REFINE_S: Final = 3.0  # after a plan made at once it is searched for longer; shorter: while more may still be changing
TRY_S: Final = 120.0  # between two trials for the same boxes and traffic; shorter: more of the coordinator's core
URGENT_S: Final = 1.0  # between two plans for urgent news of figures; shorter: more plans while several links break


class PlanningTask(msgspec.Struct, frozen=True, kw_only=True):
    """Something to plan. `run` takes seconds: it is for another process. `held`: boxes that are trusted less, and get
    no requests while others can serve; `is_urgent`: the plan is wanted at once; `news`: the figures for which it is;
    `tries`: phases change only to what carries more in a trial; `keeps_phases`: they have been tried lately, and stay;
    `regrouping`: on the way to which other groups the plan is to be; `keeping`: boxes that keep their part, because
    they have refused another; `divided`: machines that may be divided anew, by head, where that is looked for;
    `slo`: the deadlines of requests, as `read_slo` takes them."""

    boxes: tuple[BoxView, ...]
    links: tuple[LinkView, ...]
    demands: tuple[Demand, ...]
    service: str
    epoch: int
    version: int
    previous: Plan | None
    codec: str
    slo: str = DEFAULT_SLO
    held: tuple[str, ...] = ()
    is_urgent: bool = False
    tries: bool = False
    keeps_phases: bool = False
    news: str = ""
    regrouping: Regrouping | None = None
    keeping: tuple[str, ...] = ()
    divided: dict[str, BoxDivision] = {}

    def run(self, spent: Callable[[], bool], make_trial: MakeTrial | None = None) -> Plan | None:
        """The plan found until `spent()`; the previous one where nothing is better, None where nobody is ready.
        `make_trial`: by what plans are tried, where they are to be; else formulas decide."""
        trusted = tuple(box for box in self.boxes if box.peer not in self.held)
        if not self.tries:
            make_trial = None
        return self._plan(trusted, spent, make_trial) or (
            self._plan(self.boxes, spent, make_trial) if self.held else None
        )

    def _plan(self, boxes: tuple[BoxView, ...], spent: Callable[[], bool], make_trial: MakeTrial | None) -> Plan | None:
        from ...coordinator.network_plan import plan_network  # a second and 60 MB that only the coordinator pays
        from ...coordinator.planning.model.slo import read_slo  # as above
        from ...coordinator.settings import NetworkPlanSettings

        return plan_network(
            boxes,
            self.links,
            self.demands,
            service=self.service,
            epoch=self.epoch,
            version=self.version,
            previous=self.previous,
            codec=KvCodec(self.codec, codec_named(self.codec).bits),
            loading=self.regrouping.loading if self.regrouping is not None else (),
            spent=spent,
            settings=NetworkPlanSettings(most_flips=0) if self.keeps_phases else None,
            slo=read_slo(self.slo),
            make_trial=make_trial,
        )

    def propose(self, spent: Callable[[], bool]) -> RegroupProposal | None:
        """Other groups of boxes, or other cuts of machines, that would serve more of what is asked for, found until
        `spent()`: those that serve most."""
        from ...coordinator.network_problem import build_network_problem
        from ...coordinator.planning.model.slo import read_slo
        from ...coordinator.regrouping.proposal import propose_regrouping  # as above
        from ...coordinator.regrouping.recuts import NetworkFigures, propose_recuts

        codec = KvCodec(self.codec, codec_named(self.codec).bits)
        boxes = tuple(box for box in self.boxes if box.peer not in self.held)
        network = build_network_problem(
            boxes, self.links, self.demands, service=self.service, codec=codec, previous=self.previous,
            slo=read_slo(self.slo),
        )  # fmt: skip
        plan = self.previous
        if network is None or plan is None or not network.asked:
            return None
        figures = NetworkFigures(boxes, self.links, self.demands)
        found = (
            propose_recuts(
                network, plan, figures, self.divided, rate=network.asked, spent=spent, keeping=self.keeping
            ),
            propose_regrouping(network, plan, boxes, rate=network.asked, spent=spent, keeping=self.keeping),
        )  # fmt: skip
        return max(filter(None, found), key=lambda each: each.regrouping.after, default=None)

    @property
    def roster(self) -> Any:
        """What must not wait: who is there, and what each can do."""
        boxes = frozenset((box.peer, box.ready, box.draining, box.fits, box.tp, box.phase) for box in self.boxes)
        return self.epoch, self.service, self.slo, boxes, self.held, self.regrouping, self.keeping

    @property
    def figures(self) -> PlanFigures:
        """What boxes, links and gateways say."""
        return PlanFigures(boxes=self.boxes, links=self.links, demands=self.demands)

    @property
    def basis(self) -> Any:
        """Whatever a plan follows from."""
        return self.epoch, self.previous and self.previous.number, self.figures

    @property
    def quiet(self) -> bool:
        """Whether the running plan may stay: nobody asks now, so no other would serve better."""
        return self.previous is not None and is_idle(self.demands)


class PlanningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a node plans, whatever it plans for: as `services.Coordinator` is told."""

    codec: str
    quiet_s: float
    slo: str
    lends_replicas: bool


@final
class PlanNumbers:
    """Which versions this node has given to plans, of whichever service: none is given twice in an epoch, so that it
    orders all that a coordinator says."""

    def __init__(self) -> None:
        self._last = (-1, 0)  # (epoch, last version used in it)

    def next(self, epoch: int, followed: Iterable[Plan]) -> int:
        """A version above all that were used in the epoch, and all that are `followed`."""
        used = [plan.version for plan in followed if plan.epoch == epoch]
        return max([0, *used, *([self._last[1]] if self._last[0] == epoch else [])]) + 1

    def note(self, number: tuple[int, int]) -> None:
        """A plan of this number is published."""
        self._last = max(self._last, number)


@final
class ServicePlanning:
    """Makes the plans of one service while this node is the elected coordinator; idle otherwise. `numbers` and
    `damping` are those of all services."""

    def __init__(
        self, own: PeerId, service: str, settings: PlanningSettings, numbers: PlanNumbers, damping: FlapDamping
    ) -> None:
        self._own = own
        self.service = service
        self._codec = settings.codec
        self.slo = settings.slo
        """Deadlines of requests, as `read_slo` takes them; the catalogue may say others."""
        self._quiet_s = settings.quiet_s
        self._numbers = numbers
        self._number = (-1, 0)  # of the latest plan
        self._last: PlanningTask | None = None
        self.planned_at = float("-inf")
        self._look_at = float("-inf")  # for urgent news, at the earliest
        self._has_missed = False  # a change, because that moment had not come
        self._is_rough = False  # the latest plan was made at once: a longer search may find a better one
        self._tried: Any = None  # boxes and traffic that plans were tried for last
        self._tried_at = float("-inf")
        self._aside = SetAside()
        self._damping = damping
        self._progress = RegroupingProgress()
        self._adoption = Adoption()
        self._repurposing = Repurposing() if settings.lends_replicas else None
        self._moved = ""  # why a replica is to have another phase, until a plan has said so
        self._told_held: tuple[str, ...] = ()  # boxes that the latest plan says are held
        self._reasons: tuple[str, ...] = ()  # of the latest plan, without those that are said of boxes left out

    def next(self, view: NetworkView, leader: Leader | None, now: float) -> PlanningTask | None:
        """What is to be planned at `now` (seconds), if anything. Say `settle` when it is done. It is to be called when
        the view has changed, and at `wake_at`."""
        self._aside.forget(view.adverts, now)
        self._watch_pools(view, leader, now)
        self._has_missed = False
        task = self._task(view, leader, now)
        if task is None:
            return None
        last = self._last
        if last is None or task.roster != last.roster:
            return self._begin(self._with_figures(task, view, now), now, is_urgent=task.previous is not None)
        is_due = now >= self._due_at
        self._has_missed = not is_due and now < self._look_at
        if self._has_missed:
            return None
        self._look_at = now + LOOK_S * max(1.0, len(task.boxes) / LOOK_BOXES)
        task = self._with_figures(task, view, now)
        if task.quiet or (task.basis == last.basis and not (is_due and self._is_rough)):
            return None
        if is_due:
            return self._begin(task, now, is_urgent=False)
        news = find_urgent_news(task.previous, last.figures, task.figures) if task.previous is not None else ""
        is_urgent = news != find_traffic_news(last.figures, task.figures)
        return self._begin(msgspec.structs.replace(task, news=news), now, is_urgent=is_urgent) if news else None

    def wake_at(self, now: float) -> float:
        """When `next` is to be called at the latest, whether or not the view changes."""
        look_at = self._look_at if self._has_missed else inf
        due_at = self._due_at if self._due_at > now else inf
        return min(now + self._quiet_s, look_at, due_at, self._progress.refusals.wake_at(now))

    def is_outdated(self, task: PlanningTask, view: NetworkView, leader: Leader | None, now: float) -> bool:
        """Whether boxes have come, gone or failed since this task was begun: what it has found by now is enough."""
        current = self._task(view, leader, now)
        return current is None or current.roster != task.roster

    def is_urgent(self, view: NetworkView, leader: Leader | None, now: float) -> bool:
        """Whether boxes have come, gone or failed since the latest task."""
        current = self._task(view, leader, now)
        return current is not None and (self._last is None or current.roster != self._last.roster)

    def settle(
        self, task: PlanningTask, plan: Plan | None, view: NetworkView, leader: Leader | None, now: float
    ) -> Plan | None:
        """What of a finished task is to be published, if anything: things may have changed meanwhile."""
        self._aside.on_planned(now)
        if leader != (self._own, task.epoch) or view.plan_of(task.service) is not task.previous:
            self._last = None  # it has to be planned again
            return None
        if plan is None:
            return None
        held = tuple(box for box in task.held if box not in plan.peers)
        refused = self._progress.refusals.tell(now)
        if plan == task.previous:
            told = {each.peer for each in plan.refused} == {each.peer for each in refused}
            if held == self._told_held and task.regrouping == plan.regrouping and told:
                return None
            # Who looks at the plan is to see why a box that is there gets no requests.
            why = self._reasons if plan.number == self._number else plan.why
            plan = msgspec.structs.replace(plan, epoch=task.epoch, version=task.version, why=why)
        was_regrouping = task.previous is not None and task.previous.regrouping is not None
        if was_regrouping and task.regrouping is None:
            self._adoption.on_ended(now, failed=bool(self._progress.explain(None)))
        plan = msgspec.structs.replace(plan, regrouping=task.regrouping, refused=refused)
        self._progress.on_planned(task.regrouping)
        self._number, self._told_held, self._reasons = (task.epoch, plan.version), held, plan.why
        self._numbers.note(plan.number)
        self._last = msgspec.structs.replace(task, previous=plan)
        given_up = self._progress.explain(task.regrouping)
        left_out = (*self._aside.explain(now), *self._damping.explain(held, now), *_explain_unreadable(view))
        more = (f"and {len(left_out) - MAX_LEFT_OUT} more boxes are left out",) * (len(left_out) > MAX_LEFT_OUT)
        news = (*((f"planned at once: {task.news}",) * bool(task.news)), *((self._moved,) * bool(self._moved)))
        self._moved = ""
        return msgspec.structs.replace(plan, why=(*news, *given_up, *left_out[:MAX_LEFT_OUT], *more, *plan.why))

    def on_failed(self, task: PlanningTask, reason: str, now: float) -> bool:
        """Planning went wrong with what some box says: the next task leaves boxes out. Returns whether there are any
        to leave out."""
        told = {box.peer for box in task.boxes} | {link.source for link in task.links}
        self._last = None
        if self._aside.on_failed(told, reason, now):
            return True
        self._last = task  # the same again would fail again: only news is planned with
        return False

    def seek(self, view: NetworkView, leader: Leader | None, now: float) -> PlanningTask | None:
        """What other groups are to be looked for at, if they are: say `consider` when that is done."""
        if leader is None or leader[0] != self._own or not self._adoption.is_due(now):
            return None
        task = self._task(view, leader, now)
        if task is None or task.previous is None or task.regrouping is not None:
            return None
        divided = divided_boxes(view.adverts, task.service)
        task = msgspec.structs.replace(self._with_figures(task, view, now), divided=divided)
        if not any(demand.requests_s > 0.0 for demand in task.demands):  # what is only assumed moves no box
            self._adoption.consider(None, now)
            return None
        return task

    def consider(
        self, found: RegroupProposal | None, view: NetworkView, leader: Leader | None, now: float
    ) -> Regrouping | None:
        """A look for other groups has found this: what the next plan begins with, if that is worth it. Raises PlanError
        where things have changed meanwhile."""
        if not self._adoption.consider(found, now) or found is None or view.plan_of(self.service) is None:
            return None
        expected = found.regrouping
        order = RegroupOrder(
            service=self.service,
            groups=found.groups,
            recuts=found.recuts,
            before=expected.before,
            after=expected.after,
            reload_s=expected.reload_s,
        )
        return self.order(order, view, leader)

    def order(self, order: RegroupOrder, view: NetworkView, leader: Leader | None) -> Regrouping:
        """These groups, or these cuts, are wanted: the next plan begins with their first step. Raises PlanError."""
        if leader is None or leader[0] != self._own:
            raise PlanError("this node does not coordinate the network; ask the one that does")
        plan = view.plan_of(order.service)
        if plan is None:
            raise PlanError(f"no plan for {order.service} is running")
        if plan.regrouping is not None or self._progress.is_ordered:
            raise PlanError("boxes are on their way to other groups already; see `p2pserve status`")
        if order.groups and order.recuts:
            raise PlanError("boxes are either grouped or divided anew; ask for the one, and then for the other")
        boxes, before, after, reload_s = view.boxes(order.service), order.before, order.after, order.reload_s
        if order.recuts:
            divided = divided_boxes(view.adverts, order.service)
            found = make_recutting(
                plan, order.recuts, divided, boxes, before=before, after=after, reload_s=reload_s
            )  # fmt: skip
        else:
            found = make_regrouping(plan, order.groups, boxes, before=before, after=after, reload_s=reload_s)
        self._progress.order(found)
        return found

    @property
    def _due_at(self) -> float:
        """When figures that have moved a little are planned with."""
        return self.planned_at + (REFINE_S if self._is_rough else self._quiet_s)

    def _begin(self, task: PlanningTask, now: float, *, is_urgent: bool) -> PlanningTask:
        tries, keeps = self._decide_trials(task, now, is_urgent=is_urgent)
        self._last = task = msgspec.structs.replace(task, is_urgent=is_urgent, tries=tries, keeps_phases=keeps)
        self.planned_at, self._look_at, self._is_rough = now, now + URGENT_S, is_urgent
        return task

    def _decide_trials(self, task: PlanningTask, now: float, *, is_urgent: bool) -> tuple[bool, bool]:
        """Whether plans are tried, and whether phases stay. What must not wait, and what is only assumed of traffic, is
        planned by formulas."""
        if is_urgent or not any(demand.requests_s > 0.0 for demand in task.demands):
            self._tried = None
            return False, False
        case = task.roster, task.demands
        if case == self._tried and now < self._tried_at + TRY_S:
            return False, True
        self._tried, self._tried_at = case, now
        return True, False

    def _with_figures(self, task: PlanningTask, view: NetworkView, now: float) -> PlanningTask:
        """With links and demands, of the boxes that are planned with."""
        left_out = self._aside.left_out(now)
        demands = view.demands(task.service)
        strangers = view.boxes_of_others(task.service) | left_out
        return msgspec.structs.replace(
            task,
            links=tuple(each for each in view.links() if each.source not in strangers),
            demands=tuple(demand for peer, demand in demands.items() if peer not in left_out),
        )

    def _task(self, view: NetworkView, leader: Leader | None, now: float) -> PlanningTask | None:
        """What there is to plan with as yet, but for links and demands: they are many, and looked at less often."""
        if leader is None or leader[0] != self._own:
            return None
        epoch, service = leader[1], self.service
        previous = view.plan_of(service)
        if previous is not None and previous.epoch > epoch:
            return None  # an election has overtaken us; the next change of the view will say so
        version = self._numbers.next(epoch, view.plans.values())
        left_out = self._aside.left_out(now)
        regrouping = self._progress.advance(
            previous.regrouping if previous is not None else None, parts_of(view.adverts), now
        )
        refusals = self._progress.refusals
        if previous is not None and previous.epoch != epoch:
            refusals.learn(previous.refused, now)
        refusals.forget({str(peer) for peer in view.adverts}, now)
        boxes = sorted((box for box in view.boxes(service) if box.peer not in left_out), key=lambda box: box.peer)
        if self._repurposing is not None:
            pins = self._repurposing.pins(previous, now)
            boxes = [msgspec.structs.replace(box, phase=box.phase or pins.get(box.peer)) for box in boxes]
        return PlanningTask(
            boxes=tuple(boxes),
            links=(),
            demands=(),
            service=service,
            epoch=epoch,
            version=version,
            previous=previous,
            codec=self._codec,
            slo=self.slo,
            held=tuple(sorted(self._damping.held([box.peer for box in boxes if box.usable], now))),
            regrouping=regrouping,
            keeping=tuple(sorted(refusals.keeping(now))),
        )

    def _watch_pools(self, view: NetworkView, leader: Leader | None, now: float) -> None:
        """See which replicas stay borrowed, and move one if it is time and this node plans."""
        plan = view.plan_of(self.service)
        if self._repurposing is None or plan is None:
            return
        self._repurposing.observe(plan, view.reported_loads(plan), now)
        if leader is not None and leader[0] == self._own and plan.regrouping is None:
            self._moved = self._repurposing.move_one(plan, now) or self._moved


def _explain_unreadable(view: NetworkView) -> list[str]:
    """A line for `status` on each box whose advert is none."""
    return [
        f"{name_of(peer)} is left out: what it says of itself cannot be read ({fault})"
        for peer, fault in sorted(view.unreadable.items())
    ]
