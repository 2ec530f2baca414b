"""Small markets for tests."""

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.coordinator.renting.needs import Needs
from p2pserve.coordinator.renting.offers import Market, Offer
from p2pserve.coordinator.renting.places import parse_place
from p2pserve.sims.workloads import azure

MODEL = model_shape("llama-13b")
NEEDS = Needs(model=MODEL)


def box(
    name: str, card: str = "A40", gpus: int = 4, usd: float = 1.6, *, place: str = "Texas, US", up: float = 2.0,
    down: float = 2.0, usd_per_gb: float = 0.0, away: float = 0.01,
) -> Offer:  # fmt: skip
    return Offer(
        id=name, record=1, market=Market.VAST, name=name, host="9", place=parse_place(place),
        gpu=gpu_table().find(card, Specs.MEASURED), gpus=gpus, gpu_link_gbps=150.0, usd_per_hour=usd,
        usd_per_gb_month=0.1, up_gbps=up, down_gbps=down, up_usd_per_gb=usd_per_gb, down_usd_per_gb=usd_per_gb,
        disk_gb=500.0, ports=10, cuda=13.0, compute_capability=8.6, away=away,
    )  # fmt: skip


def service(ttft_s: float = 3.0, tpot_s: float = 0.15) -> Service:
    lengths = azure("conversation").lengths
    workload = Workload(name="conversation", prompts=lengths.prompt[:400], outputs=lengths.output[:400], rate=1.0)
    return Service(name="llama-13b", model=MODEL, workload=workload, slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s))
