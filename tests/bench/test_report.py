"""The report marks missed targets and busy machines, and explains its columns."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.bench.machine import OtherUsage, ProcessorUser
from everbeat.bench.report import BenchReport, figure_document
from everbeat.bench.sampling import Conditions, FigureBound, Sample, TakenMeasurement, figures_of


def report_of(samples: list[Sample], *, other_cores: float | None, allow_busy: bool = False) -> BenchReport:
    others = None
    if other_cores is not None:
        busiest = (ProcessorUser(name="burner", pid=7, cores=other_cores),)
        others = OtherUsage(cores=other_cores, own_cores=1.0, over_s=1.0, busiest=busiest)
    taken = TakenMeasurement(
        group="drain", name="drain", round=0, samples=tuple(samples), others=others, is_discarded=False
    )
    conditions = Conditions(limit_cores=0.15, patience_s=1.0, allow_busy=allow_busy)
    return BenchReport(head={}, taken=(taken,), conditions=conditions)


SAMPLES = [
    Sample(name="rows", value=100, unit="rows/s"),
    Sample(name="one", value=100, unit="ms", beside="rows", target=FigureBound(at_least=1.3, unless="other")),
    Sample(name="other", value=70, unit="ms", beside="rows", target=FigureBound(at_least=0.75, unless="one")),
    Sample(name="wait", value=1, unit="ms", target=FigureBound(at_most=2)),
]


def test_the_bench_report_marks_missed_targets_and_explains_its_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_of(SAMPLES, other_cores=0.02).show()
    table, legend = capsys.readouterr()
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "MISSED" in rows["one"]
    assert "ratio >= 1.3 *" in rows["one"]
    assert "<= 2 ms" in rows["wait"]
    assert rows["wait"].endswith("yes")
    for word in ("RATIO", "BESIDE", "TARGET", "INTERVAL: too few pairs", "* One of these two is enough"):
        assert word in legend
    assert "SPREAD" not in legend  # there was one value
    assert "at most 0.02 cores" in legend
    assert "BUSY" not in table + legend
    figures = {one.name: one for one in figures_of((0, sample) for sample in SAMPLES)}
    assert figure_document(figures["other"])["target"] == {
        "of": "ratio",
        "at_least": 0.75,
        "at_most": None,
        "unless": "one",
        "met": False,
    }


@pytest.mark.parametrize(
    ("other_cores", "mark", "busy"), [(0.84, "0.84 cores", True), (None, "unknown", None)]
)
def test_the_bench_report_marks_every_figure_of_a_busy_or_unknown_machine(
    capsys: pytest.CaptureFixture[str], other_cores: float | None, mark: str, busy: bool | None
) -> None:
    report = report_of(SAMPLES, other_cores=other_cores, allow_busy=True)
    report.show()
    table, legend = capsys.readouterr()
    assert all(line.endswith(mark) for line in table.splitlines()[1:])
    assert "BUSY" in legend
    document: Any = report.document()
    assert document["foreign"]["busy"] is busy
    assert [one["busy"] for one in document["figures"]] == [busy] * 4
