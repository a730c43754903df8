"""The map in CONTRIBUTING.md has every room of the source tree, and the place of its tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "everbeat"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NOT_ROOMS = {"__init__.py", "__main__.py", "_top_level.py", "py.typed", "__pycache__"}


def first_column(heading: str) -> set[str]:
    """The names in the first column of the table with this heading."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*\n\| ---.*\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    assert table is not None, heading
    cells = [row.split(" | ")[0] for row in table[1].splitlines()]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_map_in_contributing_lists_every_package_and_no_other() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()} - NOT_ROOMS
    modules = {path.name for path in SOURCE.glob("*.py")} - NOT_ROOMS
    facades = {name for name in modules if f"`everbeat.{name.removesuffix('.py')}`" in decisions()}
    assert first_column("Room") == packages | modules - facades


def test_every_package_without_its_own_test_folder_is_listed_with_the_one_that_has_its_tests() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()} - NOT_ROOMS - {"sql"}
    without = {name for name in packages if not (ROOT / "tests" / name).is_dir()}
    assert first_column("Tests of") == without


def decisions() -> str:
    return (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
