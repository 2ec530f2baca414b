"""The table of cards: names and aliases, its three columns, and what is said of a card that is not in it."""

import msgspec
import pytest

from p2pserve.coordinator.costs.efficiency import DEFAULT, EfficiencyError, efficiency_of, parse_efficiencies
from p2pserve.coordinator.costs.gpus import GpuError, Specs, gpu_table, parse_gpus

HEAD = "name,aliases,memory_gib,mem_bw_gbps,fp16_tflops_dense,nvlink_gbps,pcie_gen,typical_usd_per_hour\n"
TABLE = parse_gpus(HEAD + "X1-8GB,X1| x one ,8,500.5,60,0,4,0.25\nX2-16GB,,16,900,120,600,5,1.5\n")
FACTORS = "name,compute_share,bandwidth_share,layer_us,reduce_us,source\n"


def test_a_row_is_a_card() -> None:
    card = TABLE.find("X1-8GB")
    assert (card.name, card.memory_gib, card.memory_gbps, card.tflops) == ("X1-8GB", 8.0, 500.5, 60.0)
    assert (card.nvlink_gbps, card.pcie_gen, card.usd_per_hour, card.specs) == (0.0, 4, 0.25, Specs.DENSE)
    assert TABLE.names == ("X1-8GB", "X2-16GB")


@pytest.mark.parametrize("name", ["X1-8GB", "x1-8gb", " X1 ", "X One"])
def test_a_card_goes_by_its_aliases_in_any_case(name: str) -> None:
    assert TABLE.find(name).name == "X1-8GB"


def test_an_empty_alias_names_no_card() -> None:
    with pytest.raises(GpuError, match="GPU '' is not in the table of 2 cards"):
        TABLE.find("")


def test_a_card_that_is_not_there_is_answered_with_those_near_it() -> None:
    with pytest.raises(GpuError, match=r"GPU 'X1-80GB' is not in the table of 2 cards; near it: X1-8GB$"):
        TABLE.find("X1-80GB")
    with pytest.raises(GpuError, match=r"GPU 'toaster' is not in the table of 2 cards$"):
        TABLE.find("toaster")


def test_table_1_has_its_own_figures_for_five_cards() -> None:
    dense, printed = (gpu_table().find("A40", specs) for specs in (Specs.DENSE, Specs.TABLE1))
    assert (printed.memory_gbps, printed.tflops, printed.memory_gib, printed.usd_per_hour) == (
        696.0,
        149.7,
        48.0,
        0.403,
    )
    assert (printed.name, printed.pcie_gen, printed.specs) == (dense.name, dense.pcie_gen, Specs.TABLE1)
    with pytest.raises(GpuError, match="has no X1-8GB: use --specs dense or measured"):
        TABLE.find("x1", Specs.TABLE1)


def test_what_engines_measure_is_in_no_table() -> None:
    with pytest.raises(GpuError, match="no figures that engines measure"):
        gpu_table().find("A40", Specs.ENGINE)


def test_an_imagined_card_has_a_part_of_the_rates_of_a_real_one() -> None:
    card, slow = TABLE.find("X1-8GB"), TABLE.find(" x1 / 4 ")
    assert (slow.name, slow.memory_gbps, slow.tflops, slow.memory_gib) == ("X1-8GB/4", 500.5 / 4, 15.0, 8.0)
    assert TABLE.find(slow.name) == slow
    measured = gpu_table().find("A40/2", Specs.MEASURED)
    assert efficiency_of(measured) == efficiency_of(gpu_table().find("A40", Specs.MEASURED))
    assert efficiency_of(measured) != efficiency_of(gpu_table().find("A40"))
    assert (card.name, card.tflops) == ("X1-8GB", 60.0)


@pytest.mark.parametrize("divisor", ["", "1", "0.5", "-2", "nan", "inf", "101", "x", "2/2"])
def test_rates_are_divided_by_a_number_above_1(divisor: str) -> None:
    with pytest.raises(GpuError, match=f"GPU 'X1-8GB': '{divisor}' is no number above 1 to divide its rates by"):
        TABLE.find(f"x1/{divisor}")


def test_measured_figures_are_dense_ones_with_their_own_factors() -> None:
    dense, measured = (gpu_table().find("A40", specs) for specs in (Specs.DENSE, Specs.MEASURED))
    assert (measured.tflops, measured.memory_gbps) == (dense.tflops, dense.memory_gbps)
    assert efficiency_of(measured) != efficiency_of(dense)


def test_of_rates_that_an_engine_has_reached_nothing_is_taken_off() -> None:
    card = gpu_table().find("A40")
    default = efficiency_of(card)
    engine = efficiency_of(msgspec.structs.replace(card, specs=Specs.ENGINE))
    assert (engine.compute_share, engine.bandwidth_share) == (1.0, 1.0)
    assert (engine.layer_s, engine.reduce_s) == (default.layer_s, default.reduce_s)
    assert default.name == DEFAULT
    assert 0.0 < default.compute_share < 1.0


def test_factors_are_in_microseconds() -> None:
    found = parse_efficiencies(FACTORS + "x,0.5,1.0,10,2.5,a paper\n")["x"]
    assert (found.compute_share, found.bandwidth_share, found.source) == (0.5, 1.0, "a paper")
    assert (found.layer_s, found.reduce_s) == pytest.approx((1e-5, 2.5e-6))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x,0,0.8,10,10,s", "compute_share of x is 0.0"),
        ("x,0.5,1.01,10,10,s", "bandwidth_share of x is 1.01"),
        ("x,0.5,0.5,1e6,10,s", "layer_s of x is 1.0 s; it must be 0 to 1"),
        ("x,0.5,0.5,0,-1,s", "reduce_s of x"),
    ],
)
def test_factors_that_no_card_has(row: str, words: str) -> None:
    with pytest.raises(EfficiencyError, match=words):
        parse_efficiencies(FACTORS + row + "\n")
