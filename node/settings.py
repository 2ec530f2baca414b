"""How a node is run: what its owner says of the box, and what may be tuned, in frozen values.

    NodeSettings(home=Path("~/.p2pserve/node"), listen=Address("0.0.0.0", 4001), model="bundled", tuning=LAN)

`WAN` is for boxes in different places; `LAN` for boxes side by side. Tests pass their own with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..bootstrap import Address, Bootstrap
from ..bootstrap.streams.strangers import StrangerLimits
from ..coordinator import Phase, RoutingSettings
from ..coordinator.costs.gpus import Specs
from ..coordinator.costs.model_shape import KvChoice
from ..coordinator.repair.urgency import REPAIR_S
from ..coordinator.requests.admission import AdmissionSettings
from ..coordinator.requests.retry_times import RetrySettings
from ..coordinator.requests.values import RequestSettings
from ..kvtransport.probing.figures import BoxFigures
from ..kvtransport.wire.permits import MAX_PERMITS
from .owner.dividing import DividedBox
from .web.keys import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLinkSettings:
    """What the box's owner says of its links: its site, its caps and prices, and what a path may cost."""

    site: str = ""
    relay_private: bool = False  # forward for others to addresses that only this box and its neighbours can reach
    box: BoxFigures = field(default_factory=BoxFigures)
    usd_per_s: float | None = None  # what a second saved is worth; None: paths are chosen by time alone
    max_usd_per_gb: float | None = None  # dearer paths are not taken; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingSettings:
    """How `box.fitting` divides a box's memory and time. What it estimates must not be more than the engine finds."""

    cpu_share: float = 0.9  # of the memory of a box without GPUs; more: longer requests, less for whatever else runs
    gpu_fixed_bytes: int = 768 << 20  # on each GPU: libraries, workspaces; less: longer requests, or no start
    step_s: float = 0.1
    """At most for a step beyond the least. Longer: what a step costs besides its products counts less; shorter: a short
    prompt waits less for a long one."""
    stage_model_len: int = 16_384  # tokens a stage has room for at least; fewer: more layers, shorter requests
    tokens_per_request: int = 1024  # that it is expected to hold on average; fewer: more requests at once, and graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxEngineSettings:
    """What the box's owner says of its engine; see `engine.protocol.EngineConfig` for what it costs."""

    backend: str = "vllm"  # the engine: a name of `engine.backends`
    dtype: str = "auto"
    kv_cache_mib: int | None = None  # None: 256 on a CPU, what is free on a GPU
    kv_cache_dtype: KvChoice = "auto"  # fp8, fp8_e5m2: twice the tokens in the same memory, for some quality
    max_batched_tokens: int | None = None  # None: by the device
    max_requests: int | None = None  # None: by the device and its room for KV
    max_model_len: int | None = None  # tokens of prompt and answer; None: what fits, at most the model's
    async_scheduling: bool | None = None  # None: by the device
    threads: int | None = None  # of a CPU engine; None: all cores but one
    tp: int | None = None  # GPUs that share each layer; None: all that can
    memory_gib: float | None = None  # for weights and KV; None: what the box has
    emulate: str | None = None  # of the emulated engine: the GPUs that it models, like 4xA40
    emulate_specs: str = Specs.DENSE  # the column of the GPU table that counts for them
    emulate_load_gb_s: float = 0.0  # GB/s that its weights are read at whenever it starts; 0: in no time
    emulate_throttle: tuple[float, float] | None = None
    """So many seconds after its first step, steps take so many times as long; None: it stays as fast as its cards."""
    fitting: FittingSettings = field(default_factory=FittingSettings)
    sweep_s: float = 0.0
    """For so long the box's first engine is measured before it takes requests; 0: not at all. Longer: a better profile
    to begin with; shorter: it serves sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What clients may have at one gateway. What is beyond is refused at once, with a time to try again.

    Requests and tokens count from their acceptance to their last token. Higher limits take larger bursts, let what
    waits wait longer, and cost the memory that is told beside them; those of one client are what a stranger with a
    client's token can take of the others.
    """

    requests: int = 256  # of one client
    all_requests: int = 4096  # some 20 kB each
    tokens: int = 2 << 20  # of prompts and answers of one client
    all_tokens: int = 4 << 20  # 40 bytes each
    prompts: int = 128  # of one client that wait to be tokenised; fewer than `NetworkSettings.max_requests`
    text_bytes: int = 6 << 20  # of those; at least MAX_PROMPT_BYTES
    all_text_bytes: int = 16 << 20  # some 5 bytes each
    tokenizing_bytes: int = 4 << 20  # being tokenised; 200 bytes each, for some seconds
    share: float = 15.0
    """A client may have so many times what is left free of the engines' room: all but a sixteenth when it is alone.
    Higher: engines are fuller while one client asks; lower: who comes next waits less, and steps are shorter."""
    queued_s: float = 0.25
    """So much prefilling may lie at engines before a client is given more of it; long prompts come one by one. Longer:
    engines are kept busy over slower links; shorter: who comes next is served sooner."""
    output_cost: float = 2.0  # of a token of an answer, in tokens of a prompt; higher: long answers count for more
    retry: RetrySettings = field(default_factory=RetrySettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)


PENDING_HELLOS: Final = StrangerLimits(total=256, each=128, for_members=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTuning:
    """Seconds, unless a name says otherwise. Each says which way it pulls."""

    # What is told to all members, and how often. More often: others act on fresher figures, and gossip grows with it.
    advert_interval_s: float = 1.0  # between adverts without news; news goes out at once
    load_interval_s: float = 0.25  # at least, between those that tell of requests, of a node whose box services share
    links_interval_s: float = 2.0  # between tables of links, of a node with at most
    links_nodes: int = 8  # other nodes; in proportion longer with more: what each of them hears stays the same
    probe_interval_s: float = 1.0  # between two looks for a link to measure; shorter: news is measured sooner
    infer_interval_s: float = 10.0  # between two inferences from links of the same sites, while nothing new is measured
    watch_interval_s: float = 0.05  # between two looks at what others tell; bounds the work that many reports cause
    link_news: float = 0.2  # figures of a link are told again when they have moved by this fraction
    link_age_s: float = 600.0  # or when they have been measured again so much later; shorter: ages that are shown fit

    expect_interval_s: float = 0.25  # between two looks at who is waited for; shorter: one that hangs is found sooner
    expect_idle_s: float = 2.0  # the same while there is no request, of which this box would hear

    # Planning, on the coordinator. A longer search finds a better plan, and replaces a bad one later.
    planning_s: float = 5.0  # what is best by then is the plan
    repair_s: float = REPAIR_S  # the same, where a plan is made at once; another search follows
    trials_s: float = 5.0  # of a core, in which plans are tried besides
    planning_limit_s: float = (
        30.0  # planning that has not ended by then has failed; a busy machine may need twice the above
    )
    planning_memory_mib: int = 2048  # beside the 60 that its process takes; plans for 1,000 boxes take a quarter
    quiet_s: float = 15.0
    """Figures of boxes and links move all the time: they are planned with so often. Boxes that come, go or change what
    they can do are planned with at once."""

    replace_s: float = 60.0
    """The first interval after which services are placed anew on boxes that host several, and the shortest. Shorter:
    they follow what clients ask for sooner, and engines start more often."""

    # Plans on their way from the coordinator, and what this node says against them.
    plan_piece_s: float = 10.0  # for a piece; longer: slow links bring it; shorter: a hung node is left sooner
    plan_turns: int = 3  # nodes that get pieces from here at once; more: each of them is slower, and asks nobody else
    plan_turn_s: float = 3.0  # who asks for no further piece for so long has lost its turn
    plan_retry_s: float = 0.5  # before a node that had nothing is asked again; doubles with each time
    plan_last_retry_s: float = 4.0  # at most
    plan_missing_s: float = 60.0  # after which a coordinator is objected to whose plan nobody has
    plan_strange_s: float = 10.0  # the same, for a plan without a box that is known here; adverts take seconds
    judge_s: float = 2.0  # between two looks at whether there is something against it
    worth_s: float = 5.0  # between two looks at whether the box is worth its price
    plan_stale_s: float = 45.0
    """The same, from when this box last told what it is: until then a plan that does not fit it may be honest, and made
    before. Longer than two plans take. Shorter: a coordinator that plans nonsense is passed over sooner."""

    # Questions to other nodes. Longer: a slow peer is waited for; shorter: a request finds another route sooner.
    ask_s: float = 5.0  # for a link or a burst; also for dialling a burst
    permit_ask_s: float = 1.0  # a relay for a permit, while a transfer waits that can go without it
    stage_ask_s: float = 8.0  # a head its stages for their ends of a transfer; less than a gateway waits
    stage_open_s: float = 120.0  # a stage for its process: its fork server may still be importing vLLM
    stage_retry_s: float = 0.5  # before a stage that was not ready is asked again
    pipe_lease_s: float = 86_400.0  # of a pipe's ticket: its connection is made once, and it is of no use afterwards
    hello_s: float = 5.0  # for the first bytes of a connection
    hello_poll_s: float = 0.02  # between two looks for the rest of them; shorter: slow links start sooner, for more CPU
    pending_hellos: StrangerLimits = PENDING_HELLOS
    """Bulk connections whose first bytes are waited for. More: strangers may hold more sockets."""

    # KV transfers.
    max_transfer_s: float = 120.0
    """For so long KV is waited for, and a prompt's blocks are held for it; then the prompt is computed where it goes.
    Longer: slow links may finish; shorter: a lost transfer blocks less of the cache."""
    link_lease_s: float = 600.0  # connections that carry nothing for so long are closed; the next transfer dials again
    warm_s: float = 60.0  # after its last transfer a path counts as warm: no dialling, a window that is open
    fresh_s: float = 2.0  # an engine reports several times a second while something moves; older reports say nothing
    limited_bytes: int = 2 << 20  # with so much waiting at both ends of an interval, the link set the pace

    # Paths. What a link is taken for before anything is known of it: higher figures try it more readily.
    unmeasured_rtt_s: float = 0.05
    unmeasured_gbps: float = 1.0
    permit_life_s: float = 3600.0  # for which this node lets others use it as a relay
    permit_bytes: int = 1 << 40  # that it forwards for one permit, where its owner sets no budget
    permits: int = MAX_PERMITS  # of all nodes; and
    permits_each: int = 128  # of one, for other targets each; more: it reaches more through here at a time
    proof_s: float = 60.0  # for which an address is known to be its node's, or not; shorter: more dials for askers
    calls_s: float = 16.0  # connections per second that another node may have dialled from here, where it cannot dial
    calls_burst: int = 128  # of them at once: the streams of two links
    around_life_s: float = 86_400.0  # of a permit to a node that nobody can dial: its control stream runs over it, too
    client_bytes: int = (
        256 << 20
    )  # that a client may have forwarded to such a node by one permit; more: longer sessions
    client_bytes_s: float = 4e6  # at so many per second
    address_s: float = 5.0  # between two looks at which address this box has; shorter: a change is noticed sooner
    reach_s: float = 300.0  # between two questions whether it can be dialled there; shorter: costs members dials
    permit_margin_s: float = 30.0  # before its end a relay's permit is asked for anew
    relay_refused_s: float = 60.0  # a relay that has refused is not asked again for so long

    # What clients may ask of this node's gateway.
    clients: ClientLimits = field(default_factory=ClientLimits)

    # The engine process.
    move_s: float = 60.0
    """For so long requests may finish on a box before it takes another part of the plan, and then go on elsewhere.
    Longer: fewer are computed twice; shorter: boxes that are to change together wait less for each other."""
    migrate_s: float = 8.0
    """So long before a box leaves or takes another part, what still runs there goes on elsewhere with its KV; at most a
    third of the time that requests have to finish. Longer: more KV gets through; shorter: more finish."""
    max_failures: int = 5  # in a row, before it is given up
    first_backoff_s: float = 1.0  # after the first failure; doubles with each
    max_backoff_s: float = 30.0
    healthy_after_s: float = 300.0  # an engine that ran this long starts from no failures
    profile_interval_s: float = 5.0  # between two fits of its steps; one takes some ten milliseconds, on a thread

    def migrate_before_s(self, finish_s: float) -> float:
        """So long before its end what still runs goes on elsewhere, where requests have `finish_s` to finish."""
        return min(self.migrate_s, finish_s / 3.0)

    def backoff_s(self, failures: int) -> float:
        """Pause before the start that follows the n-th failure in a row."""
        return min(self.max_backoff_s, self.first_backoff_s * 2.0 ** max(0, failures - 1))


DEFAULT_SLO: Final = "5x"
"""Deadlines of requests, as `read_slo` takes them: multiples of a lone request on the network's fastest replica."""

WAN: Final = NodeTuning()
LAN: Final = NodeTuning(ask_s=2.0, hello_s=2.0, unmeasured_rtt_s=0.0005, unmeasured_gbps=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The OpenAI API of a box, where it is asked for or other nodes carry requests to it. Times are seconds."""

    keys: tuple[ApiKey, ...] = ()  # that let in; none: whoever reaches it, which must be this box alone
    admin_token: str | None = None  # of admin API and dashboard; None: they answer to this box alone
    needs_no_key: bool = False  # unless its owner says that others may
    names: tuple[str, ...] = ()  # by which requests may call the model; none: the one that it has here
    options: tuple[str, ...] = ()  # of vLLM's command line, as `engine.api.options` lets them pass
    max_body_bytes: int = 16 << 20  # of a request; larger: longer prompts, and as much more memory for each at a time
    deadline_s: float = 3600.0  # of an answer; longer: slow ones come to their end, and lost ones hold their place
    idle_s: float = 300.0  # without requests, after which a process that listens nowhere ends; 70 MB stay as long
    state_s: float = 0.25  # between two looks at who serves; shorter: refusals are up to date sooner
    first_backoff_s: float = 0.2  # before one that died is started again; doubles with each in a row
    max_backoff_s: float = 10.0
    healthy_s: float = 30.0  # one that ran so long starts from no failures


@dataclass(frozen=True, slots=True, kw_only=True)
class HostingSettings:
    """What the owner of a box says that hosts what it is given: only these entries of the catalogue, and none of those;
    `models_dir`: where models are, and downloads go; `max_disk_gib`: that downloads may take there."""

    only: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    models_dir: Path | None = None
    max_disk_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How to run a node. `bootstrap` None makes a new network; `model` None hosts no engine."""

    home: Path
    listen: Address
    announce: str | None = None
    bootstrap: str | None = None
    token: str | None = None
    also: tuple[Bootstrap, ...] = ()  # of a new network: other addresses that its tokens name
    model: str | None = None
    codec: str = "kv4"
    slo: str = DEFAULT_SLO  # of the plans that this node makes if it is elected
    links: BoxLinkSettings = field(default_factory=BoxLinkSettings)
    engine: BoxEngineSettings = field(default_factory=BoxEngineSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    requests: RequestSettings = field(default_factory=RequestSettings)
    http: Address | None = None  # where this node serves the OpenAI API; None: nowhere
    api: ApiSettings = field(default_factory=ApiSettings)
    tuning: NodeTuning = WAN
    join_timeout_s: float = 60.0  # how long to ask members that do not answer; longer: one that starts later is found
    drain_s: float = 30.0  # longer: more requests finish here; shorter: the box is free sooner
    ends_at: float | None = None  # unix seconds at which the box ends, if that is known: the node leaves before
    phase: Phase | None = None  # what the box is to do, whatever would be best
    usd_per_hour: float = 0.0
    engine_channel: int | None = None  # of a fork server that several nodes of one machine share
    engine_socket: Path | None = None  # of one that nodes of this box dial, so that their engines share a process
    hosting: HostingSettings | None = None  # it hosts what the coordinator gives it; `model` is None then
    beside: tuple[str, ...] = ()  # the nodes of this box, itself among them, whose engines share a process
    divided: DividedBox | None = None  # the machine, where several nodes share it and the network may divide it anew
