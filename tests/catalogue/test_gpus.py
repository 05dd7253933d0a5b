"""The catalogue's rows, the names that find them, and NVML's answers."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
from fake_nvml import fake_nvml

from autotune.catalogue import card_file
from autotune.catalogue.gpu_rows import PEAK_DTYPES
from autotune.catalogue.gpus import Gpu, catalogue, detect, find_gpu, for_budget
from autotune.common.units import GIB, MIB
from autotune.errors import ConfigError

SQUARES = Path(__file__).parents[2] / "studies" / "kernels" / "tables" / "matmul_square.csv"
SEARCHED = (
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200",
    "NVIDIA B200",
)
NVIDIA_CARDS = [gpu for gpu in catalogue() if gpu.vendor == "nvidia"]


def test_the_catalogue_holds_all_cards_of_the_table() -> None:
    assert len(catalogue()) == len({gpu.slug for gpu in catalogue()}) == 118


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.slug)
def test_a_row_is_plausible_and_sourced(gpu: Gpu) -> None:
    assert gpu.source
    assert gpu.capacity_source
    assert gpu.confidence in ("high", "medium", "low")
    # A card withholds something, never a tenth of it (ECC in GDDR memory takes a sixteenth).
    assert 0.9 * gpu.nominal_memory_bytes < gpu.capacity_bytes < gpu.nominal_memory_bytes
    assert set(gpu.peak_flop_per_second) <= set(PEAK_DTYPES)
    assert all(1e12 < peak < 1e16 for peak in gpu.peak_flop_per_second.values())
    # Popular tables list sparse rates: the dense fp16 peak is at most 32 times fp32's.
    peaks = gpu.peak_flop_per_second
    assert peaks["float16"] <= 32 * peaks.get("float32", float("inf"))
    if gpu.memory_bandwidth_bytes_per_second is not None:
        assert 1e11 < gpu.memory_bandwidth_bytes_per_second < 1e13
    for dtype, rate in gpu.measured_flop_per_second.items():
        # Turing and Volta have no tensor cores for bf16 and tf32. GeForce cards run above their boost clock.
        peak = peaks[dtype if dtype in peaks else "float32"]
        assert 0.25 < rate / peak < 1.2, dtype


@pytest.mark.parametrize("gpu", NVIDIA_CARDS, ids=lambda gpu: gpu.slug)
def test_what_cuda_decides_is_known_for_every_nvidia_card(gpu: Gpu) -> None:
    assert gpu.compute_capability is not None
    assert gpu.context_bytes is not None
    assert 100 * MIB <= gpu.context_bytes <= 768 * MIB
    large = gpu.compute_capability[0] >= 9
    assert gpu.cublas_workspace_bytes == (32 * MIB if large else 8_519_680)
    assert ("bfloat16" in gpu.peak_flop_per_second) == (gpu.compute_capability >= (8, 0))


@pytest.mark.parametrize(
    ("slug", "published_mib"),
    [("t4", 141), ("rtx-4090", 520), ("l40s", 522), ("rtx-5090", 619), ("b200", 612)],
)
def test_a_context_is_about_what_processes_held(slug: str, published_mib: int) -> None:
    """The highest published of each card (studies/headroom/contexts.csv; of a B200, with CUDA 13)."""
    context_bytes = find_gpu(slug).context_bytes
    assert context_bytes is not None
    assert abs(context_bytes / MIB - published_mib) < 90


def test_what_cuda_decides_is_unknown_for_other_vendors() -> None:
    card = find_gpu("mi300x")
    assert card.vendor == "amd"
    assert card.compute_capability is None
    assert card.context_bytes is None
    assert card.cublas_workspace_bytes is None


def test_units_of_a_row() -> None:
    card = find_gpu("RTX 3060")
    assert card.capacity_bytes == 12_622_168_064
    assert card.nominal_memory_bytes == 12 * 2**30
    assert card.memory_bandwidth_bytes_per_second == 360e9
    assert card.peak_flop_per_second["bfloat16"] == 25.5e12
    # PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 / 8 bits
    assert card.pcie_bandwidth_bytes_per_second == pytest.approx(31.508e9, rel=1e-4)
    # The 4060 Ti has eight lanes.
    assert find_gpu("4060 ti").pcie_bandwidth_bytes_per_second == pytest.approx(15.754e9, rel=1e-4)


def test_every_card_has_a_bandwidth() -> None:
    assert [card.name for card in catalogue() if not card.memory_bandwidth_bytes_per_second] == []
    # 384 bit of GDDR6 at 14.5 Gbit/s
    assert find_gpu("a40").memory_bandwidth_bytes_per_second == 384 * 14.5e9 / 8


def test_what_the_table_left_open_stays_unknown() -> None:
    assert "tf32" not in find_gpu("mi210").peak_flop_per_second
    assert find_gpu("gb300").l2_bytes is None


@pytest.mark.parametrize("gpu", NVIDIA_CARDS, ids=lambda gpu: gpu.slug)
def test_clock_and_multiprocessors_explain_the_peak(gpu: Gpu) -> None:
    """The dense fp16 peak is a power of two of FLOP per multiprocessor and clock, or up to 15 % less.

    The P100 has no tensor cores: two of each of its 64 lanes.
    """
    if gpu.boost_clock_hertz is None:
        assert gpu.slug == "gb300"
        return
    assert gpu.num_sms is not None
    of_one = gpu.peak_flop_per_second["float16"] / gpu.num_sms / gpu.boost_clock_hertz
    whole = 2 ** round(math.log2(of_one / 0.95))
    assert 0.8 < of_one / whole < 1.03
    assert whole == 128 if gpu.slug == "p100-pcie-16gb" else 512 <= whole <= 8192


@pytest.mark.parametrize(
    ("slug", "mib"),
    [("a100", 40), ("h200", 60), ("b200", 126), ("l40s", 96), ("rtx-4060", 24), ("2080 ti", 5.5)],
)
def test_units_of_the_l2_cache(slug: str, mib: float) -> None:
    assert find_gpu(slug).l2_bytes == mib * MIB


def _medians() -> dict[str, dict[str, float]]:
    """Median of the machines by card and dtype, in TFLOP/s, without the rows marked as outliers."""
    found: dict[str, dict[str, list[float]]] = {}
    with SQUARES.open() as file:
        for row in csv.DictReader(file):
            if "outlier" in row["where"]:
                continue
            for card in filter(None, row["card"].split("; ")):
                for dtype in set(PEAK_DTYPES) - {"float8"}:
                    if cell := row[f"{dtype}_tflop_per_second"]:
                        found.setdefault(card, {}).setdefault(dtype, []).append(float(cell))
    return {
        card: {dtype: statistics.median(rates) for dtype, rates in by_dtype.items()}
        for card, by_dtype in found.items()
    }


def test_measured_rates_are_the_medians_of_the_table() -> None:
    medians = _medians()
    assert len(medians) > 45
    for card, by_dtype in medians.items():
        measured = find_gpu(card).measured_flop_per_second
        assert measured.keys() == by_dtype.keys(), card
        for dtype, rate in by_dtype.items():
            # bfloat16 of data-centre cards: the best of many shapes elsewhere.
            slack = 0.09 if dtype == "bfloat16" and card in SEARCHED else 0.001
            assert measured[dtype] / 1e12 == pytest.approx(rate, rel=slack), (card, dtype)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("rtx-4070", "NVIDIA RTX 4070"),
        ("RTX 4070", "NVIDIA RTX 4070"),
        ("4090", "NVIDIA RTX 4090"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("t4", "NVIDIA T4"),
        # As NVML and torch.cuda.get_device_name spell them.
        ("Tesla V100-SXM2-16GB", "NVIDIA V100-SXM2 16GB"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA RTX 3090"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada"),
        ("NVIDIA A10G", "NVIDIA A10G"),
    ],
)
def test_names(name: str, card: str) -> None:
    assert find_gpu(name).name == card


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.slug)
def test_every_spelling_of_a_row_finds_that_row(gpu: Gpu) -> None:
    assert {find_gpu(name).name for name in (gpu.name, gpu.slug, *gpu.aliases)} == {gpu.name}


def test_another_model_of_a_series_is_not_taken_for_its_neighbour() -> None:
    for name in ("rtx-4065-ti", "rtx 4070 super ti", "rtx 4085 laptop gpu", "", "---"):
        with pytest.raises(ConfigError, match="Unknown GPU"):
            find_gpu(name)


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match='Did you mean "rtx-4070"'):
        find_gpu("rtx-4071")


@pytest.mark.parametrize(
    ("budget_gb", "slug"),
    [
        (8, "rtx-4060"),
        (12, "rtx-4070"),
        (16, "rtx-4080"),
        (24, "rtx-4090"),
        (32, "rtx-5090"),
        (48, "l40s"),
        (80, "a100-sxm4-80gb"),
        (141, "h200"),
        (180, "b200"),
        (270, "b300"),
    ],
)
def test_the_card_to_plan_for(budget_gb: int, slug: str) -> None:
    card = for_budget(budget_gb * 10**9)
    assert card.slug == slug
    assert card.memory_bandwidth_bytes_per_second is not None
    assert "bfloat16" in card.peak_flop_per_second


def test_a_budget_beyond_every_card_is_an_error() -> None:
    cards = [card for card in catalogue() if card.vendor == "nvidia"]
    largest = max(cards, key=lambda card: card.capacity_bytes)
    with pytest.raises(ConfigError, match=f"The largest is the {largest.name} with"):
        for_budget(400 * 10**9)


def test_a_card_is_a_value() -> None:
    card = find_gpu("a100")
    assert hash(card) == hash(dataclasses.replace(card))
    assert json.loads(json.dumps(dataclasses.asdict(card)))["name"] == card.name


def test_detection_gives_the_catalogues_card_its_real_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fake_nvml(monkeypatch, ["NVIDIA GeForce RTX 4070"])
    (card,) = detect()
    assert card.name == "NVIDIA RTX 4070"
    assert card.capacity_bytes == (12288 - 250) * MIB
    assert card.capacity_source == "NVML"
    assert card.peak_flop_per_second == find_gpu("rtx-4070").peak_flop_per_second
    assert calls == ["shutdown"]


def test_detection_with_an_older_driver_takes_the_whole_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA GeForce RTX 4070"], reserved_bytes=None)
    assert detect()[0].capacity_bytes == 12288 * MIB


def test_a_detected_card_outside_the_catalogue_has_no_invented_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA GeForce RTX 4065 Ti"])
    (card,) = detect()
    assert card.name == "NVIDIA GeForce RTX 4065 Ti"
    assert card.compute_capability == (8, 9)
    assert card.cublas_workspace_bytes == 8_519_680
    assert card.peak_flop_per_second == {}
    assert card.memory_bandwidth_bytes_per_second is None
    assert card.confidence == "detected"
    # Its multiprocessors are not known: as many as the largest card of the family.
    assert card.context_bytes == find_gpu("l40s").context_bytes


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA GeForce RTX 3080", 10, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 16, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 6, "rtx-3060-laptop-gpu"),
    ],
)
def test_the_memory_tells_cards_of_one_name_apart(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: int, card: str
) -> None:
    fake_nvml(monkeypatch, [name], total_bytes=gib * GIB)
    assert detect()[0].slug == card


def test_the_same_name_with_a_memory_that_no_row_has_is_another_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA GeForce RTX 3080"], total_bytes=20 * GIB)
    assert detect()[0].peak_flop_per_second == {}


@pytest.mark.parametrize(
    ("slug", "clock_ghz", "series"),
    [
        # Peaks of NVIDIA's own tables, where the rule gives them: boost clocks of its product pages.
        ("rtx-2080-ti", 1.545, "Turing"),
        ("rtx-3060-12gb", 1.777, "Ampere"),
        ("rtx-3080-10gb", 1.71, "Ampere"),
        ("rtx-3090", 1.695, "Ampere"),
        ("rtx-a4000", 1.56, "Ampere, workstation"),
        ("rtx-a5000", 1.695, "Ampere, workstation"),
        ("rtx-4070", 2.475, "Ada"),
        ("rtx-4080", 2.505, "Ada"),
        ("rtx-4090", 2.52, "Ada"),
        ("rtx-6000-ada", 2.505, "Ada, workstation"),
        ("rtx-5080", 2.617, "Blackwell"),
        ("rtx-5090", 2.407, "Blackwell"),
    ],
)
def test_the_rule_gives_the_peaks_that_nvidia_lists(
    slug: str, clock_ghz: float, series: str
) -> None:
    card = find_gpu(slug)
    relative, source = next(
        (each, found)
        for each in catalogue()
        if each.architecture == series
        and (found := re.fullmatch(r"(\d+) SM x \d+ FLOP x ([\d.]+) GHz", each.source))
    )
    sms = card.num_sms
    assert sms is not None
    scale = sms * clock_ghz / (int(source[1]) * float(source[2]))
    for dtype, peak in relative.peak_flop_per_second.items():
        assert peak * scale == pytest.approx(card.peak_flop_per_second[dtype], rel=0.01), dtype


CARD = """
name = "RTX of mine"
compute_capability = "8.9"
memory_nominal_gib = 20
memory_bandwidth_gb_per_second = 600
peak_tflop_per_second = { float16 = 80, bfloat16 = 80, tf32 = 40, float32 = 40 }
num_sms = 64
"""


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_text(CARD)
    card = find_gpu(str(path))
    assert (card.name, card.compute_capability, card.num_sms) == ("RTX of mine", (8, 9), 64)
    assert card.capacity_bytes == 19 * GIB
    # Half of an RTX 4090's multiprocessors: a context beside the 50 MiB that any has.
    of_4090 = find_gpu("rtx-4090").context_bytes
    assert card.context_bytes is not None
    assert of_4090 is not None
    assert 2 * (card.context_bytes - 50 * MIB) == of_4090 - 50 * MIB
    assert card.peak_flop_per_second["bfloat16"] == 80e12
    path.write_text(CARD + "capacity_gib = 19.5\ncontext_mib = 300\n")
    card = find_gpu(str(path))
    assert (card.capacity_bytes, card.context_bytes) == (19.5 * GIB, 300 * MIB)


def test_a_card_of_the_catalogue_in_a_machine_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_text('like = "rtx-3090"\nbetween_gpus_gb_per_second = 12\n')
    card = find_gpu(str(path))
    assert card == dataclasses.replace(find_gpu("rtx-3090"), reached_bytes_per_second=12e9)
    assert 'between_gpus_gb_per_second" = 12.0' in card_file.written(card)
    path.write_text(card_file.written(card))
    assert find_gpu(str(path)).reached_bytes_per_second == 12e9
    assert find_gpu("rtx-3090").reached_bytes_per_second is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('like = "rtx-3091"\nbetween_gpus_gb_per_second = 12', "rtx-3091"),
        ('like = "other.toml"\nbetween_gpus_gb_per_second = 12', "other.toml"),
        ('like = "rtx-3090"', "between_gpus_gb_per_second"),
        ('like = "rtx-3090"\nbetween_gpus_gb_per_second = 0', "between_gpus_gb_per_second"),
        ('like = "rtx-3090"\nbetween_gpus_gb_per_second = 12\nnum_sms = 9', "num_sms"),
        ("like = 3090\nbetween_gpus_gb_per_second = 12", "like"),
    ],
)
def test_a_file_of_a_card_of_the_catalogue_with_a_mistake_names_it(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        find_gpu(str(path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("num_sms = 64", ""), "num_sms"),
        (("num_sms = 64", "num_sms = 0"), "num_sms"),
        (("600", "-600"), "memory_bandwidth"),
        (("600", "nan"), "memory_bandwidth"),
        (('"8.9"', '"ada"'), "compute_capability"),
        (("float16 = 80,", "half = 80,"), "half"),
        (("num_sms = 64", "num_sms = 64\ncolour = 1"), "colour"),
        (("num_sms = 64", "num_sms = 64\ncapacity_gib = 24"), "capacity_gib"),
        (("num_sms = 64", "num_sms ="), "line"),
    ],
)
def test_a_card_file_with_a_mistake_names_it(
    tmp_path: Path, change: tuple[str, str], why: str
) -> None:
    path = tmp_path / "card.toml"
    path.write_text(CARD.replace(*change))
    with pytest.raises(ConfigError, match=why):
        find_gpu(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        find_gpu(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA L4"]),
        ("0,1", ["Tesla T4", "NVIDIA L4"]),
        ("GPU-1a", ["NVIDIA L4"]),
        # In the order in which torch numbers them; what follows an unknown one is not seen.
        ("1,0", ["NVIDIA L4", "Tesla T4"]),
        ("0,9,1", ["Tesla T4"]),
        ("", []),
        ("-1", []),
    ],
)
def test_detection_obeys_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    fake_nvml(monkeypatch, ["Tesla T4", "NVIDIA L4"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [card.name for card in detect()] == names


def test_without_a_driver_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["NVIDIA L4"], error="Driver Not Loaded")
    assert detect() == []


def test_without_the_library_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect() == []


@pytest.mark.parametrize(
    ("name", "interconnect", "bytes_per_second"),
    [
        # NVIDIA prints both directions: 600, 900 and 1,800 GB/s.
        ("a100", "NVLink", 300e9),
        ("h100", "NVLink", 450e9),
        ("b200", "NVLink", 900e9),
        # 16 lanes of 16 GT/s, 128 of 130 bits.
        ("rtx-4090", "PCIe", 31.508e9),
        ("a100-pcie-40gb", "PCIe", 31.508e9),
    ],
)
def test_what_connects_cards(name: str, interconnect: str, bytes_per_second: float) -> None:
    card = find_gpu(name)
    assert card.interconnect == interconnect
    found = card.interconnect_bandwidth_bytes_per_second
    assert found == pytest.approx(bytes_per_second, rel=1e-4)


def test_a_link_that_is_not_known_stays_unknown() -> None:
    assert find_gpu("mi300x").interconnect_bandwidth_bytes_per_second is None
