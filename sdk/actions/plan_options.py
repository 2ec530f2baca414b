"""What `p2pserve plan` is given: options, files and names, as the planner's values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import msgspec

from ...coordinator import Phase
from ...coordinator.costs.gpus import Specs
from ...coordinator.costs.model_shape import KvChoice, ModelShape, ModelShapeError, model_shape, shape_of_config
from ...coordinator.planning.model.cluster import Cluster, ClusterError
from ...coordinator.planning.model.cluster_file import packaged_cluster, parse_cluster
from ...coordinator.planning.model.kv_quality import find_kv_quality, resolve_kv_cache_dtype
from ...coordinator.planning.model.problem import Problem
from ...coordinator.planning.model.slo import parse_slo
from ...coordinator.planning.model.workload import Service, Workload, WorkloadError
from ...kernels.codecs import codec_named
from ...sims.workloads import AZURE, azure, workload_from
from ..errors import UsageError

PHASES: Final = tuple(phase.value for phase in Phase)


def problem_of(arguments: SimpleNamespace) -> Problem:
    """What the options ask for. Raises UsageError, or the planner's own errors, with one line."""
    specs = Specs(arguments.specs)
    if arguments.cluster is None:
        live = ", or --live for the running network" if hasattr(arguments, "live") else ""  # `sim` has no such option
        raise UsageError(f"cluster: give --cluster FILE{live}")
    cluster = read_cluster(arguments.cluster, specs)
    codec = codec_named(arguments.codec)
    kept: KvChoice = arguments.kv_cache_dtype or "auto"
    services = tuple(
        replace(
            item,
            codec=codec.name,
            kv_bits=codec.bits,
            model=item.model.with_kv_cache_dtype(resolve_kv_cache_dtype(kept, item.model)),
        )
        for item in _services(arguments)
    )
    known = {box.id for box in cluster.boxes}
    for box in (*(text.partition("=")[0] for text in arguments.pin), *arguments.exclude):
        if box not in known:
            raise UsageError(f"box {box!r} of --pin or --exclude is not in the cluster: {', '.join(sorted(known))}")
    if not 0.0 <= arguments.price_weight < 1e6:
        raise UsageError(f"price-weight: {arguments.price_weight} is not a number from 0 up")
    return Problem(
        cluster=cluster,
        services=services,
        pinned=_pins(arguments.pin, frozenset(arguments.exclude)),
        excluded=frozenset(arguments.exclude),
        price_weight=arguments.price_weight,
    )


def describe_kv_choice(model: ModelShape) -> str:
    """For people: how engines keep KV by `choose`, and why."""
    known = find_kv_quality(model, "fp8")
    if known is None:
        return f"KV of {model.name} is kept in 16 bits: what 8 cost in quality is not known for it"
    return f"KV of {model.name} is kept in 8 bits: perplexity {known.perplexity_percent:+.2f} % ({known.source})"


def _pins(texts: list[str], excluded: frozenset[str]) -> dict[str, Phase]:
    pins: dict[str, Phase] = {}
    for text in texts:
        box, _, phase = text.partition("=")
        if phase not in PHASES:
            raise UsageError(f"pin: {text!r} is not like BOX=prefill; phases are {', '.join(PHASES)}")
        if pins.setdefault(box, Phase(phase)) is not Phase(phase):
            raise UsageError(f"pin: box {box} is pinned to {pins[box]} and to {phase}")
        if box in excluded:
            raise UsageError(f"pin: box {box} is excluded as well")
    return pins


def read_cluster(where: str, specs: Specs) -> Cluster:
    """A file, or a cluster that comes with the project."""
    path = Path(where)
    if path.suffix != ".json" and not path.exists():
        return packaged_cluster(where, specs)
    try:
        return parse_cluster(_read(path, "cluster"), specs)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def read_model(where: str) -> ModelShape:
    """A known model's name, or a config.json."""
    path = Path(where)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        return model_shape(where)
    try:
        config = msgspec.json.decode(_read(path, "model"), type=dict)
    except msgspec.DecodeError as error:
        raise ModelShapeError(f"{path}: {error}") from None
    return shape_of_config(config, path.parent.name or str(path))


def read_workload(what: str, rate: float) -> Workload:
    """Poisson arrivals with an Azure trace's lengths, or a file's lengths and burstiness."""
    if what in AZURE:
        lengths = azure(what).lengths
        return Workload(name=lengths.source, prompts=lengths.prompt, outputs=lengths.output, rate=rate)
    path = Path(what)
    if not path.exists():
        raise UsageError(f"workload: {what!r} is neither a file nor one of {', '.join(AZURE)}")
    return workload_from(path, rate)


class _ServiceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    model: str
    workload: str
    rate: float
    slo: str = "5x"


def _services(arguments: SimpleNamespace) -> list[Service]:
    single = {name: getattr(arguments, name) for name in ("model", "workload", "rate")}
    if arguments.services is None:
        missing = [f"--{name}" for name, value in single.items() if value is None]
        if missing:
            raise UsageError(f"{missing[0].removeprefix('--')}: give {' and '.join(missing)}, or --services FILE")
        name = Path(arguments.model).stem
        return [_service(_ServiceEntry(name=name, slo=arguments.slo, **single))]
    given = [name for name, value in single.items() if value is not None]
    if given:
        raise UsageError(f"{given[0]}: it is in the file of --services already")
    try:
        entries = msgspec.json.decode(_read(arguments.services, "services"), type=list[_ServiceEntry])
    except msgspec.DecodeError as error:
        raise UsageError(f"services: {arguments.services}: {error}") from None
    if not entries or len({entry.name for entry in entries}) < len(entries):
        raise UsageError(f"services: {arguments.services} needs one service or more, each with a name of its own")
    return [_service(entry) for entry in entries]


def _service(entry: _ServiceEntry) -> Service:
    model = read_model(entry.model)
    try:
        workload = read_workload(entry.workload, entry.rate)
        return Service(name=entry.name, model=model, workload=workload, slo=parse_slo(entry.slo, model, workload))
    except WorkloadError as error:
        raise WorkloadError(f"service {entry.name}: {error}") from None


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{field}: {path} cannot be read: {error.strerror}") from error
