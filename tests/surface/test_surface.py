"""Test that the public surface matches its records."""

from __future__ import annotations

import sys

import pytest

from tests.surface.every_record import NAMES, OF_A_DATABASE, OF_PROCESSES, OF_THE_PACKAGE, of_a_database
from tests.surface.record import FOLDER, REMEDY, Record, difference

ON_THE_RECORDED_PYTHON = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="records are written with Python 3.11; others word some texts differently",
)


@ON_THE_RECORDED_PYTHON
@pytest.mark.parametrize("record", OF_THE_PACKAGE, ids=lambda record: record.name)
def test_the_package_matches_its_surface_records(record: Record) -> None:
    assert not (changed := record.difference()), changed


@pytest.mark.parametrize("name", OF_A_DATABASE)
def test_a_migrated_database_matches_its_surface_records(name: str, database_url: str, schema: str) -> None:
    assert not (changed := of_a_database(name, url=database_url, schema=schema).difference()), changed


@pytest.mark.story
@pytest.mark.parametrize("record", OF_PROCESSES, ids=lambda record: record.name)
def test_workers_send_statements_in_the_order_of_the_surface_record(record: Record) -> None:
    assert not (changed := record.difference()), changed


def test_every_file_of_surface_records_is_compared() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(NAMES)


def test_a_difference_to_a_surface_record_is_a_diff_with_the_remedy() -> None:
    told = difference("fruit", recorded="apple\npear\n", present="apple\nplum\n")
    assert told.splitlines()[-4:] == ["-pear", "+plum", "", f"{REMEDY} fruit"]
    assert difference("fruit", recorded="apple\n", present="apple\n") == ""
