"""Sizes of memory as users write them."""

import pytest

from everbeat.domain.settings.units import size, spelled_size
from everbeat.errors import ConfigurationError

check = size(16 << 20, 1 << 40)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("512MB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("1.5gb", 3 << 29),
        ("16384kB", 16 << 20),
        ("1TB", 1 << 40),
        (16 << 20, 16 << 20),
    ],
)
def test_a_size_becomes_bytes(given: object, count: int) -> None:
    assert check(given, subject="it") == count


@pytest.mark.parametrize("given", ["512", "MB", "-1MB", "5 Mb/s", "", True, 1.5, None, "1e3MB"])
def test_invalid_sizes_are_rejected(given: object) -> None:
    with pytest.raises(ConfigurationError, match="512MB"):
        check(given, subject="it")


@pytest.mark.parametrize(("given", "fix"), [("15MB", "16MB or more"), ((1 << 40) + 1, "1TB or less")])
def test_a_size_out_of_bounds_is_rejected_with_the_bound(given: object, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=fix):
        check(given, subject="it")


@pytest.mark.parametrize(
    ("count", "text"), [(512 << 20, "512MB"), (1 << 40, "1TB"), (1_000_001, "1000001 bytes")]
)
def test_a_spelled_size_can_be_parsed(count: int, text: str) -> None:
    assert spelled_size(count) == text
