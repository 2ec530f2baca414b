"""Offers as two markets write them: every field and unit, and what is said of records that are broken."""

import json
from pathlib import Path

import pytest

from p2pserve.coordinator.renting.offer_file import parse_offers
from p2pserve.coordinator.renting.offers import INTERRUPTED, Market, OfferError

DATA = Path(__file__).parents[1] / "data"
VAST = (DATA / "vast_offers.json").read_bytes()
RUNPOD = (DATA / "runpod_gpu_types.json").read_bytes()

RECORD = {
    "id": 7, "gpu_name": "RTX 4090", "num_gpus": 2, "gpu_ram": 24564, "dph_base": 0.8, "dph_total": 0.9,
    "min_bid": 0.3, "storage_cost": 0.2, "inet_up": 2118.4, "inet_down": 900.0, "inet_up_cost": 0.002,
    "inet_down_cost": 0.001, "pcie_bw": 12.0, "bw_nvlink": 0, "disk_space": 500.5, "direct_port_count": 250,
    "cuda_max_good": 13.0, "compute_cap": 890, "reliability2": 0.99, "geolocation": "Texas, US", "host_id": 5,
    "is_bid": False, "rentable": True, "webpage": None, "some_new_field": [1, {}],
}  # fmt: skip


def vast(**changed: object) -> bytes:
    return json.dumps([{**RECORD, **changed}]).encode()


def test_a_record_of_vast_ai_is_an_offer() -> None:
    (offer,) = parse_offers(vast()).taken
    assert (offer.id, offer.record, offer.market, offer.host) == ("7", 1, Market.VAST, "5")
    assert (offer.gpu.name, offer.gpus, offer.gpu_link_gbps) == ("RTX-4090-24GB", 2, 96.0)
    assert offer.up_gbps == pytest.approx(2.1184)  # Mb/s in the file
    assert offer.down_gbps == pytest.approx(0.9)
    assert (offer.up_usd_per_gb, offer.down_usd_per_gb) == (0.002, 0.001)
    assert (offer.disk_gb, offer.ports, offer.cuda, offer.compute_capability) == (500.5, 250, 13.0, 8.9)
    assert (offer.place.country, offer.place.continent) == ("US", "North America")
    assert offer.away == pytest.approx(0.01)
    assert offer.hourly_usd(73.0) == pytest.approx(0.8 + 0.2 * 0.1)  # a tenth of a month's hours in GB


def test_a_record_that_vast_ai_gave_out_is_read() -> None:
    (offer,) = parse_offers((DATA / "vast_offer_2022.json").read_bytes()).taken
    assert (offer.id, offer.gpu.name, offer.gpus, offer.ports) == ("5006600", "RTX-3090-24GB", 1, 25)
    assert (offer.usd_per_hour, offer.up_gbps, offer.down_gbps) == (0.32, 0.7275, 0.8076)
    assert offer.hourly_usd(10.0) == pytest.approx(0.322777777777778, abs=5e-5)  # `dph_total`, with 10 GB of disk
    assert (offer.place.text, offer.place.country) == ("Norway", "")  # without the two letters of today's records


def test_what_runpods_own_client_prints_is_read() -> None:
    offers = parse_offers((DATA / "runpod_get_gpu.json").read_bytes()).taken
    assert {(offer.market, offer.gpu.name) for offer in offers} == {(Market.RUNPOD, "A100-PCIE-80GB")}
    assert {(offer.gpus, offer.usd_per_hour) for offer in offers} >= {(1, 1.59), (8, 8 * 1.59)}


def test_an_interruptible_offer_costs_its_least_bid_and_is_away_more() -> None:
    (offer,) = parse_offers(vast(), interruptible=True).taken
    assert (offer.usd_per_hour, offer.interruptible) == (0.3, True)
    assert offer.away == pytest.approx(1.0 - 0.99 * (1.0 - INTERRUPTED))
    assert parse_offers(vast(is_bid=True)).taken == (offer,)


@pytest.mark.parametrize(
    ("name", "memory", "card"),
    [
        ("A100 SXM4", 81920, "A100-SXM4-80GB"),
        ("A100 SXM4", 40960, "A100-SXM4-40GB"),
        ("A100_PCIE", 40960, "A100-PCIE-40GB"),
        ("Tesla V100", 32768, "V100-SXM2-32GB"),
        ("RTX 4090", 49140, "RTX-4090-24GB"),  # one that was changed by hand counts as what it was
        ("RTX 4090", None, "RTX-4090-24GB"),
    ],
)
def test_cards_of_one_name_are_told_apart_by_their_memory(name: str, memory: float | None, card: str) -> None:
    assert parse_offers(vast(gpu_name=name, gpu_ram=memory)).taken[0].gpu.name == card


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"gpu_ram": "24564"}, "record 1: gpu_ram: Expected `float | null`, got `str`"),
        ({"gpu_ram": 24}, "record 1: gpu_name, gpu_ram: 24 MiB, and a RTX-4090-24GB has 24576"),
        ({"num_gpus": 0}, "record 1: num_gpus: Expected `int` >= 1"),
        ({"num_gpus": 10**9}, "record 1: num_gpus: Expected `int` <= 64"),
        ({"dph_base": -1.0}, "record 1: dph_base: Expected `float` >= 0.0"),
        ({"dph_base": 0.0}, "record 1: dph_base: a price of 0 is none"),
        ({"dph_base": None, "dph_total": None}, "record 1: dph_base, dph_total: both are missing"),
        ({"inet_up": 1e300}, "record 1: inet_up: Expected `float` <= 1000000000.0"),
        ({"gpu_name": "RTX 9999"}, "record 1: gpu_name, gpu_ram: GPU 'RTX 9999' is not in the table"),
        ({"gpu_name": "x" * 1000}, "record 1: gpu_name: Expected `str` of length <= 128"),
        ({"reliability2": 1.5}, "record 1: reliability2: Expected `float` <= 1.0"),
        ({"rentable": False}, "record 1: rentable: it is taken"),
    ],
)
def test_a_broken_record_is_one_line_with_its_number_and_field(changed: dict[str, object], why: str) -> None:
    with pytest.raises(OfferError) as caught:
        parse_offers(vast(**changed))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "the file is no JSON"),
        (b"{", "the file is no JSON"),
        (b"[" * 100_000, "the file is no JSON"),
        (b"\xff\xfe", "the file is no JSON"),
        (b"[]", "the file holds no records"),
        (b"7", "neither a list nor"),
        (b'{"data": {"gpuTypes": 3}}', "neither a list nor"),
        (b'{"error": "rate limit"}', "neither a list nor"),
        (b"[1, null, []]", "none of 3 records can be used; record 1: Expected `object`, got `int`"),
    ],
)
def test_a_file_that_is_none_says_what_to_give(text: bytes, why: str) -> None:
    with pytest.raises(OfferError, match="offers: ") as caught:
        parse_offers(text)
    assert why in str(caught.value)


def test_a_broken_record_costs_no_other() -> None:
    found = parse_offers(VAST)
    assert len(found.taken) + len(found.left_out) == 60
    told = {one.record: one.why.partition(":")[0] for one in found.left_out}
    assert {21: "rentable", 34: "gpu_ram", 42: "num_gpus", 48: "dph_base"}.items() <= told.items()
    assert {one.record for one in found.left_out if one.broken} == {34, 42, 48, 51}
    assert "gpu_name" in str(next(one for one in found.left_out if one.record == 51))
    assert not next(offer for offer in found.taken if offer.record == 10).place.country  # geolocation is null
    assert next(offer for offer in found.taken if offer.record == 56).up_gbps is None


def test_an_offer_that_is_there_twice_counts_once() -> None:
    found = parse_offers(json.dumps({"offers": [RECORD, RECORD]}).encode())
    assert len(found.taken) == 1
    assert str(found.left_out[0]) == "record 2: id: 7 was there already"


def test_types_of_runpod_are_pods_of_several_sizes() -> None:
    found = parse_offers(RUNPOD)
    forty = [offer for offer in found.taken if offer.name == "NVIDIA A40"]
    assert {(offer.gpus, offer.host) for offer in forty} == {(gpus, "secure") for gpus in (1, 2, 4, 8)}
    assert len(forty) == 16  # four of each, where the stock is high
    assert {offer.usd_per_hour / offer.gpus for offer in forty} == {0.4}
    clouds = {(offer.host, offer.gpus) for offer in found.taken if "4090" in offer.name}
    assert clouds == {*(("secure", gpus) for gpus in (1, 2, 4, 8)), *(("community", gpus) for gpus in (1, 2, 4))}
    assert all(offer.up_gbps is None and not offer.place.country for offer in found.taken)
    assert [one.record for one in found.left_out] == [6, 7]


def test_spot_prices_of_runpod() -> None:
    prices = {
        (offer.host, offer.usd_per_hour)
        for offer in parse_offers(RUNPOD, interruptible=True).taken
        if "4090" in offer.name and offer.gpus == 1
    }
    assert prices == {("secure", 0.35), ("community", 0.2)}
