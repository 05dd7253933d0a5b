"""Sizes as typed, and numbers as printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.common.units import counted, format_bytes, format_count, format_seconds, parse_bytes
from autotune.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("12GB", 12_000_000_000),
        ("12 gb", 12_000_000_000),
        ("  12.GB ", 12_000_000_000),
        ("11.5GiB", 12_348_030_976),  # 11.5 x 1,073,741,824
        ("11.5gib", 12_348_030_976),
        ("24000MB", 24_000_000_000),
        (".5TiB", 549_755_813_888),
        ("0.1GB", 100_000_000),  # a float would give 100000000.00000001
        ("1000TB", 10**15),
        ("7B", 7),
        ("12G", 12 * 10**9),
        ("500m", 500 * 10**6),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("12", "no unit"),
        ("12gig", "unknown unit 'gig'"),
        ("12 bananas", "unknown unit 'bananas'"),
        ("0GB", "not positive"),
        ("0.2B", "not positive"),
        ("-3GB", "not positive"),
        ("1001TB", "more than 1 PB"),
        ("", "not a size"),
        ("GB", "not a size"),
        ("nan", "not a size"),
        ("infGB", "not a size"),
        ("1e9GB", "not a size"),
        ("12,5GB", "not a size"),
        ("12GB 3GB", "not a size"),
        ("12GB\nrm", "not a size"),
        ("١٢GB", "not a size"),
        ("9" * 5000 + "GB", "not a size"),
    ],
)
def test_what_is_no_size_says_so_in_one_short_line(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    message = str(caught.value)
    assert part in message
    assert "\n" not in message
    assert len(message) < 250


@given(st.text(max_size=30))
def test_any_text_is_a_positive_size_or_a_config_error(text: str) -> None:
    try:
        size_bytes = parse_bytes(text)
    except ConfigError:
        return
    assert 0 < size_bytes <= 10**15


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (12_000_000_000, "11.18 GiB"),
        (-500_000_000, "-0.47 GiB"),
        (282_774_200_000, "263.4 GiB"),
        (2_618_211_300_000, "2,438.4 GiB"),
        (8_519_680, "8.1 MiB"),
        (1536, "1.5 KiB"),
        (0, "0 B"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.00085, "850 us"),
        (0.0452, "45.2 ms"),
        (0.9996, "1.00 s"),
        (7.6, "7.60 s"),
        (61.44, "61.4 s"),
        (125.2, "2 min 05 s"),
        (3 * 3600 + 59, "3 h 00 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (18_432, "18.4 k"),
        (999_600, "1.00 M"),
        (494_032_768, "494 M"),
        (1_543_714_304, "1.54 B"),
        (70_553_706_496, "70.6 B"),
        (3.2e15, "3200 T"),
    ],
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1000, "1,000 probes")]
)
def test_counted(count: int, text: str) -> None:
    assert counted(count, "probe") == text
