"""What two people would tune of an engine's KV transfers and pipeline; seconds and bytes. Each line
says which way it pulls. Sent to engine processes in `EngineConfig`."""

from __future__ import annotations

from typing import Final

import msgspec

from .transfers.wait_limits import WaitLimitSettings


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV transfers of one engine.

    Writing what arrives into the paged cache:
        write_s: how long a step may write beside a model that computes. More delivers sooner and slows the step.
        idle_write_s: the same in a step without a model, which is in nobody's way.
        thread_switch_s: how long a transfer's thread may keep the one that launches a GPU's work waiting for the
            interpreter. Less is steadier steps and more switches; Python's own is 0.005.
        idle_wait_s: pause between steps while only KV is awaited. Workers say when all of it is there, or much; what
            else has come is written after this time. Less writes it sooner, and slows the threads that decode it.
        blind_wait_s: the same where workers are on other boxes and say nothing. Less is an earlier token and more CPU.

    Memory:
        gpu_staged_bytes: decoded KV on a GPU that is not yet in its cache. More absorbs bursts, less is left for KV.
        grant_share: one transfer may send ahead at most 1/n of what all may. More keeps single transfers shorter of
            credit on long links, less lets one of them fill the memory.
        window_bytes: K and V that are read and encoded at once. More is fewer frames, later first bytes.
        window_share: a window is at most 1/n of the host buffer, so that n are under way at once.

    Prompts that wait for each other, when two engines are both full:
        yield_after_s: KV that has waited so long for blocks makes a finished prompt give up its own.
        yield_apart_s: pause between two prompts that give theirs up.

    Watching:
        look_s: how often progress is asked for and what is late given up.
        report_s: how often the agent is told how links get on.
        wait_limits: how late KV may be before it is computed instead.

    Layer by layer or at once (`pacing`):
        prefills_kept, prefills_enough: medians are over so many prefills of each kind, once there are so many.
        changed: prefills this much slower or faster than before mean that the machine is another one now.

    What comes before its link or request is known:
        early_paths, early_paths_s: new paths of links that are not open: how many are kept, and for how long.
        early_connections, early_connection_s: the same of accepted connections.
    """

    write_s: float = 0.001
    idle_write_s: float = 0.02
    thread_switch_s: float = 0.00005
    idle_wait_s: float = 0.02
    blind_wait_s: float = 0.001
    gpu_staged_bytes: int = 64 << 20
    grant_share: int = 4
    window_bytes: int = (4 << 20) - 32  # half the payload of a frame
    window_share: int = 4
    yield_after_s: float = 3.0
    yield_apart_s: float = 1.0
    look_s: float = 0.05
    report_s: float = 0.25
    wait_limits: WaitLimitSettings = WaitLimitSettings()
    prefills_kept: int = 8
    prefills_enough: int = 3
    changed: float = 1.3
    early_paths: int = 256
    early_paths_s: float = 5.0
    early_connections: int = 256
    early_connection_s: float = 30.0


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica that spans boxes, as one of its stages sees it.

    Starting:
        connect_s: for all pipes to be up. The other boxes may be fetching a model; the agent may end it sooner.
        handshake_s: for one connection to say who it is.
        retry_s: least pause after a dial that failed; the longest is twice that.
        greeting_s: for a forked worker to answer: a fork of a process with much memory takes its time.

    Waiting for another stage:
        look_s: how long a thread polls before it sleeps, if that was enough the last time. A core that has slept has
            lost its caches; more costs a core, less costs every token a wake-up.
        look_on_one_core: poll also where there is one core, which the other stage may need.
        rest_s: after this time without a reader, the pipe's own thread listens for the other end.
        batch_s: a worker that is alive may take so long for a batch. Loading is bounded by its liveness alone.

    Keeping caches warm meanwhile (`warm_up`):
        message_warm_up_s, max_message_bytes: the last message is repeated this often, unless it is larger.
        layer_warm_up_s, max_weight_bytes: so is a product with a matrix of the stage, unless that is larger.

    Sending:
        at_once_bytes: activations up to this size are sent by the thread that computed them. Every connection's send
            buffer has room for as many such batches as there are stages.
    """

    connect_s: float = 600.0
    handshake_s: float = 10.0
    retry_s: float = 0.25
    greeting_s: float = 60.0
    look_s: float = 0.02
    look_on_one_core: bool = False
    rest_s: float = 0.1
    batch_s: float = 300.0
    message_warm_up_s: float = 0.001
    max_message_bytes: int = 16 << 10
    layer_warm_up_s: float = 0.0005
    max_weight_bytes: int = 2 << 20
    at_once_bytes: int = 16 << 10


TRANSFER_DEFAULTS: Final = TransferSettings()
PIPELINE_DEFAULTS: Final = PipelineSettings()


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that shares a process with the other engines of its fork server that do; they step one at a time.

    service: what it is called among them; no two have the same name.
    order: who steps next, one of `LIVE_ORDERS`. That of the process's first engine counts.
    lengths: means of the tokens of its prompts and answers, as the network knows them, until it has its own; None: it
        does not.
    hang_s: a turn, or loading, that takes longer ends the process. Longer: a slow disk or a first compilation is waited
        for; shorter: the other models go on sooner.
    """

    service: str
    order: str = "db"
    lengths: tuple[int, int] | None = None
    hang_s: float = 300.0
