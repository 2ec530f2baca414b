"""Links that nobody measured: how far boxes are, what is assumed for it, and that it is what the data say."""

import csv
from collections import defaultdict
from importlib.resources import files

import numpy as np
import pytest

from p2pserve.coordinator.renting.links import LINK_RANGES, Outlook, cluster_of
from p2pserve.coordinator.renting.places import Distance, Location, distance, parse_place

from .markets import NEEDS, box

REGIONS = {
    "US": "us-east-1 us-east-2 us-west-1 us-west-2 us-west-2c eastus westus southcentralus us-central1-a us-west1",
    "CA": "ca-central-1 canadacentral", "DE": "eu-central-1 germanywestcentral", "SE": "eu-north-1",
    "IE": "eu-west-1 northeurope", "GB": "eu-west-2", "NL": "westeurope", "BE": "europe-west1-b",
    "JP": "ap-northeast-1 japaneast", "KR": "ap-northeast-2 koreacentral", "SG": "ap-southeast-1", "IN": "ap-south-1",
    "TW": "asia-east1-a", "AU": "ap-southeast-2 australiaeast australia-southeast1-a", "BR": "sa-east-1",
}  # fmt: skip
COUNTRY = {region: country for country, regions in REGIONS.items() for region in regions.split()}


def test_ranges_are_the_percentiles_of_what_was_measured() -> None:
    measured = defaultdict(list)
    text = (files("p2pserve.sims") / "data" / "wan_links.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        ends = [row[end].partition(":")[2] for end in "ab"]
        if row["rtt_ms"] and row["multi_stream_gbps"] and all(end in COUNTRY for end in ends):
            one, other = (Location(country=COUNTRY[end], site=end) for end in ends)
            measured[distance(one, other)].append((float(row["rtt_ms"]), float(row["multi_stream_gbps"])))
    assert set(measured) == {Distance.SITE, Distance.COUNTRY, Distance.CONTINENT, Distance.WORLD}
    for kind, rows in measured.items():
        rtt_ms, gbps = np.percentile(np.array(rows), [10.0, 50.0, 90.0], axis=0).T
        for outlook, rtt, rate in zip(Outlook, rtt_ms[::-1], gbps, strict=True):
            assert LINK_RANGES[kind][outlook].rtt_s * 1e3 == pytest.approx(rtt, abs=0.06), (kind, outlook)
            assert LINK_RANGES[kind][outlook].gbps == pytest.approx(rate, abs=0.06), (kind, outlook)


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("Texas, US", "Virginia, US", Distance.COUNTRY),
        ("Texas, US", "Quebec, CA", Distance.CONTINENT),
        ("Sweden, SE", "Japan, JP", Distance.WORLD),
        ("US", ", US", Distance.COUNTRY),
        ("", "Texas, US", Distance.UNKNOWN),
        ("Atlantis, ZZ", "Texas, US", Distance.UNKNOWN),
        ("somewhere", "somewhere", Distance.UNKNOWN),
    ],
)
def test_distance_by_what_is_said_of_places(one: str, other: str, kind: Distance) -> None:
    assert distance(parse_place(one), parse_place(other)) is kind


def test_boxes_in_one_building_are_nearest() -> None:
    assert distance(parse_place(None, "cluster 12"), parse_place("Texas, US", "cluster 12")) is Distance.SITE


def test_a_link_is_bounded_by_both_lines_and_billed_at_both_ends() -> None:
    slow = box("slow", up=0.2, down=0.4, usd_per_gb=0.002)
    fast = box("fast", up=10.0, down=10.0, usd_per_gb=0.01)
    cluster = cluster_of([slow, fast], Outlook.EXPECTED, NEEDS)
    assert cluster.gbps[0, 1] == pytest.approx(0.2 * 0.75)
    assert cluster.gbps[1, 0] == pytest.approx(0.4 * 0.75)
    assert cluster.usd_per_gb[0, 1] == pytest.approx(0.012)
    assert cluster.boxes[0].usd_per_hour == pytest.approx(slow.hourly_usd(NEEDS.disk_gb(slow)))


def test_outlooks_are_in_order() -> None:
    boxes = [box("a"), box("b", place="Japan, JP"), box("c", place="")]
    worst, expected, best = (cluster_of(boxes, outlook, NEEDS) for outlook in Outlook)
    assert (worst.gbps <= expected.gbps).all()
    assert (expected.gbps <= best.gbps).all()
    assert (worst.rtt_s >= expected.rtt_s).all()
    assert (expected.rtt_s >= best.rtt_s).all()
