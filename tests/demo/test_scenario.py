"""The scenario sends enough files for each fault, and no more than it can count in time."""

from __future__ import annotations

import pytest

from everbeat.demo.scenario import FINISH_BY_S, MOST_A_SHARE, fitting, shares


@pytest.mark.parametrize("number", [3, 4, 5, 12, 100, 400])
def test_every_file_of_a_demo_is_in_one_share_and_every_fault_has_one(number: int) -> None:
    paths = [str(place) for place in range(number)]
    parts = shares(paths, faults=3)
    assert [path for part in parts for path in part] == paths
    assert len(parts) == 4
    assert all(1 <= len(part) <= MOST_A_SHARE for part in parts[:3])


def test_the_last_share_of_a_demo_has_as_many_files_as_there_is_time_for() -> None:
    paths = [str(place) for place in range(100)]
    assert len(fitting(paths, ended=100, in_s=10.0, elapsed_s=FINISH_BY_S - 4)) == 40
    assert fitting(paths, ended=100, in_s=10.0, elapsed_s=10.0) == paths
    assert fitting(paths, ended=100, in_s=10.0, elapsed_s=FINISH_BY_S + 1) == []
