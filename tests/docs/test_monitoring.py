"""The alert rules, the board and the list of metrics name only metrics that exist. Prometheus's own tool reads all expressions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everbeat.domain.metrics import names
from everbeat.domain.metrics.names import Metric

ROOT = Path(__file__).parents[2]
RULES = ROOT / "monitoring" / "everbeat-alerts.yml"
BOARD = ROOT / "monitoring" / "everbeat-board.json"
KEDA = ROOT / "monitoring" / "everbeat-keda.yml"
PAGE = ROOT / "docs" / "metrics.md"
METRICS = [each for each in vars(names).values() if isinstance(each, Metric)]
SERIES = {each.name: each for each in METRICS if each.kind != "histogram"} | {
    f"{each.name}_{part}": each
    for each in METRICS
    if each.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
_SERIES = re.compile(r"\b(everbeat_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin" / "promtool"


def board_expressions() -> Iterator[str]:
    def within(panels: list[dict[str, Any]]) -> Iterator[str]:
        for panel in panels:
            yield from (target["expr"] for target in panel.get("targets", []))
            yield from within(panel.get("panels", []))

    yield from within(json.loads(BOARD.read_text())["panels"])


def promtool() -> str:
    """Return Prometheus's tool, which `make test` unpacks; skip the test with a clear reason if there is none."""
    found = shutil.which("promtool") or (str(_UNPACKED) if _UNPACKED.exists() else None)
    if found is None:
        pytest.skip(
            "LOUD: no promtool here, so nothing is known about whether Prometheus accepts the alert rules."
        )
    return found


def accepts(folder: Path, *words: str) -> str:
    done = subprocess.run([promtool(), *words], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def keda_queries() -> list[str]:
    return re.findall(r"query: (.+)", KEDA.read_text())


@pytest.mark.parametrize("place", ["rules", "board", "keda"])
def test_every_series_and_label_of_the_rules_and_the_board_exists(place: str) -> None:  # O5
    rules = re.findall(r"expr: (.+(?:\n {10,}.+)*)", RULES.read_text())
    expressions = {"board": [*board_expressions()], "rules": rules, "keda": keda_queries()}[place]
    assert len(expressions) > (1 if place == "keda" else 15)
    for expression in expressions:
        used = _SERIES.findall(expression)
        assert used, expression
        for name, matchers in used:
            assert name in SERIES, f"{name} in {expression}"
            assert set(_MATCHER.findall(matchers)) <= set(SERIES[name].labels), expression


def test_the_first_alert_is_the_one_on_overdue_leases() -> None:  # O5
    first = re.search(r"- alert: (\w+)\s+expr: (.+)", RULES.read_text())
    assert first is not None
    assert first.groups() == ("EverbeatLeasesOverdue", "everbeat_leases_overdue > 0")


def test_each_alert_names_a_command_that_shows_its_cause() -> None:  # O5
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule["annotations"] for group in groups for rule in group["rules"]}
    silent = [name for name, told in alerts.items() if "`" not in told.get("description", "")]
    assert silent == []
    assert (
        "`everbeat explain schedule:{{ $labels.schedule }}`"
        in alerts["EverbeatScheduleOverdue"]["description"]
    )


def test_prometheus_accepts_the_rules_and_the_expressions_of_the_board(tmp_path: Path) -> None:  # O5
    assert "SUCCESS" in accepts(tmp_path, "check", "rules", "--lint-fatal", str(RULES))
    rules = [
        {"record": f"board:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(board_expressions())
    ]
    (tmp_path / "board.yml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules" in accepts(tmp_path, "check", "rules", "board.yml")


def test_the_example_for_keda_is_a_scaled_object_whose_queries_prometheus_accepts(tmp_path: Path) -> None:
    (document,) = yaml.safe_load_all(KEDA.read_text())
    assert (document["apiVersion"], document["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = document["spec"]
    assert 0 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert spec["scaleTargetRef"]["name"]
    queries = [each["metadata"]["query"] for each in spec["triggers"]]
    assert queries == keda_queries()
    for each in spec["triggers"]:
        assert each["type"] == "prometheus"
        assert each["metadata"].keys() == {"serverAddress", "query", "threshold"}
        assert float(each["metadata"]["threshold"]) > 0, "a text, as KEDA requires"
        assert isinstance(each["metadata"]["threshold"], str)
    rules = [{"record": f"keda:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "keda.yml").write_text(json.dumps({"groups": [{"name": "keda", "rules": rules}]}))
    assert "SUCCESS: 2 rules" in accepts(tmp_path, "check", "rules", "keda.yml")


def test_prometheus_fires_on_overdue_leases_and_waiting_tasks_but_not_on_a_paused_queue(
    tmp_path: Path,
) -> None:  # O5
    def fires(alert: str, at: str, *series: tuple[str, str], labels: dict[str, str] | None) -> dict[str, Any]:
        expected = [] if labels is None else [{"exp_labels": {"severity": "page", **labels}}]
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series],
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}],
        }

    mail = {"instance": "c", "queue": "mail"}
    waits = ('everbeat_oldest_due_seconds{instance="c",queue="mail"}', "600x30")
    tests = [
        fires("EverbeatLeasesOverdue", "10m", ("everbeat_leases_overdue", "0x20"), labels=None),
        fires("EverbeatLeasesOverdue", "10m", ("everbeat_leases_overdue", "0x3 2x20"), labels={}),
        fires(
            "EverbeatTasksWait",
            "10m",
            waits,
            ('everbeat_queue_paused{instance="c",queue="mail"}', "0x30"),
            labels=mail,
        ),
        fires(
            "EverbeatTasksWait",
            "10m",
            waits,
            ('everbeat_queue_paused{instance="c",queue="mail"}', "1x30"),
            labels=None,
        ),
    ]
    # The tool compares annotations too, which are not the subject here.
    plain = re.sub(r"        annotations:\n(?: {10,}.+\n?)+", "", RULES.read_text())
    (tmp_path / "rules.yml").write_text(plain)
    (tmp_path / "tests.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    assert "SUCCESS" in accepts(tmp_path, "test", "rules", "tests.yml")


def test_the_page_lists_exactly_the_metrics_that_exist() -> None:
    listed = {
        name for line in PAGE.read_text().splitlines() if line.startswith("| `everbeat_")
        for name in re.findall(r"`(everbeat_\w+)`", line.split("|")[1])
    }  # fmt: skip
    assert listed == {each.name for each in METRICS}
