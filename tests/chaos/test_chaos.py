"""Tests of chaos runs: short and long runs, and runs that must detect a queue that breaks its promises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.plan import KINDS, OF_LIVENESS, OF_NATS, Kind
from tests.chaos.producers import ROOT
from tests.nats_server import find_program

pytestmark = [
    pytest.mark.story,
    pytest.mark.skipif(
        sys.platform != "linux", reason="chaos freezes processes and shifts clocks as Linux does"
    ),
]

PROVES_NOTHING = 2
PACKAGE = ROOT / "src" / "everbeat"
DOUBT = "DOUBT_AFTER_S: Final = 1.5"
FENCE = "where t.claim_id = a.claim_id and t.state = 'RUNNING'"
IMMUNITY = "or t.taken_at > clock_timestamp()"


@dataclass(frozen=True)
class ChaosRun:
    """A finished chaos run and its output."""

    code: int
    said: str
    report: dict[str, Any]

    @property
    def injected(self) -> set[str]:
        return {kind for kind, line in self.report["figures"]["lines"].items() if line["injected"]}


def run_chaos(folder: Path, *options: str, within_s: float) -> ChaosRun:
    report = folder / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "--report",
        str(report),
        "--failed",
        str(folder / "failed"),
        *options,
    ]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=within_s
    )
    said = done.stdout + done.stderr
    print(said)
    return ChaosRun(done.returncode, said, json.loads(report.read_text()) if report.exists() else {})


@pytest.mark.timeout(620)
def test_a_short_chaos_run_keeps_all_promises(tmp_path: Path) -> None:  # I1 to I29, L3, L7
    kinds = (*KINDS, Kind.READ_ONLY, Kind.PROMOTE)
    for seed in ("47", "48", "49"):
        ran = run_chaos(tmp_path, "--seed", seed, "--seconds", "15", "--only", *kinds, within_s=200)
        if ran.code != PROVES_NOTHING:  # 15 s can be too short for an attempt to write late
            break
    assert ran.code == 0, ran.said[-4_000:]
    left_out = {Kind(text.split(":")[0]) for text in ran.report["skipped"]}
    assert set(kinds) - left_out <= ran.injected
    assert ran.report["figures"]["refused"] > 0


@pytest.mark.long
@pytest.mark.timeout(2_400)
def test_a_long_chaos_run_keeps_all_promises(tmp_path: Path) -> None:  # I1 to I29, L3, L7
    seed, seconds = os.environ.get("CHAOS_SEED", "1"), os.environ.get("CHAOS_SECONDS", "600")
    ran = run_chaos(tmp_path, "--seed", seed, "--seconds", seconds, within_s=float(seconds) + 600)
    assert ran.code == 0, ran.said[-4_000:]
    needs_more = {Kind.FILL_DISK, Kind.SHIFT_CLOCK, Kind.KILL_TURN_HOLDER}
    assert ran.injected >= {*KINDS, *OF_LIVENESS} - needs_more


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_chaos_run_with_nats_keeps_all_promises(tmp_path: Path) -> None:  # I1 to I29, L3, L7, N1 to N4
    find_program()
    seed, seconds = os.environ.get("CHAOS_SEED", "1"), os.environ.get("CHAOS_NATS_SECONDS", "60")
    ran = run_chaos(tmp_path, "--nats", "--seed", seed, "--seconds", seconds, within_s=float(seconds) + 600)
    assert ran.code == 0, ran.said[-4_000:]
    assert len(set(OF_NATS) & ran.injected) > len(OF_NATS) / 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_chaos_run_detects_a_relay_that_never_publishes_again(
    tmp_path: Path,
) -> None:  # mutant: lost messages stay lost
    find_program()
    shutil.copytree(PACKAGE, tmp_path / "everbeat", ignore=shutil.ignore_patterns("__pycache__"))
    sweeper = tmp_path / "everbeat" / "nats" / "relay.py"
    text = sweeper.read_text()
    assert DOUBT in text
    sweeper.write_text(text.replace(DOUBT, "DOUBT_AFTER_S: Final = 1_000.0"))
    options = ["--nats", "--seed", "2", "--seconds", "15", "--only", "freeze_tree", "--source", str(tmp_path)]
    ran = run_chaos(tmp_path, *options, within_s=400)
    assert ran.code == 1, ran.said[-4_000:]
    assert "N5" in {breach["number"] for breach in ran.report["breaches"]}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_chaos_run_without_lost_attempts_is_reported_as_empty(tmp_path: Path) -> None:
    ran = run_chaos(tmp_path, "--seed", "1", "--seconds", "5", "--only", "delay", within_s=300)
    assert ran.code == PROVES_NOTHING, ran.said[-4_000:]
    assert "EMPTY: seed 1: no attempt was lost" in ran.said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_chaos_run_detects_writes_guarded_by_state_only(
    tmp_path: Path,
) -> None:  # mutant: guarded by state only
    shutil.copytree(PACKAGE, tmp_path / "everbeat", ignore=shutil.ignore_patterns("__pycache__"))
    settle = tmp_path / "everbeat" / "sql" / "task" / "settle_attempts.sql"
    text = settle.read_text()
    assert FENCE in text
    settle.write_text(text.replace(FENCE, "where t.state = 'RUNNING'"))
    options = ["--seed", "2", "--seconds", "15", "--only", "freeze_tree", "--source", str(tmp_path)]
    ran = run_chaos(tmp_path, *options, within_s=400)
    assert ran.code == 1, ran.said[-4_000:]
    assert {breach["number"] for breach in ran.report["breaches"]} & {"I7", "I8", "I10", "I11", "I12"}
    # The failed plan is kept, and the same plan passes with the fence.
    (kept,) = (tmp_path / "failed").iterdir()
    assert run_chaos(tmp_path, "--replay", str(kept), within_s=400).code == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the library that shifts the clock needs a C compiler",
)
def test_a_chaos_run_detects_turns_that_a_clock_set_back_prolongs(tmp_path: Path) -> None:  # mutant
    shutil.copytree(PACKAGE, tmp_path / "everbeat", ignore=shutil.ignore_patterns("__pycache__"))
    turn = tmp_path / "everbeat" / "sql" / "fragment" / "turn.sql"
    text = turn.read_text()
    assert IMMUNITY in text
    turn.write_text(text.replace(IMMUNITY, ""))
    options = ["--seed", "2", "--seconds", "6", "--only", "kill_turn_holder", "--source", str(tmp_path)]
    ran = run_chaos(tmp_path, *options, within_s=600)
    assert ran.code == 1, ran.said[-4_000:]
    assert "L3" in {breach["number"] for breach in ran.report["breaches"]}
    (kept,) = (tmp_path / "failed").iterdir()
    replayed = run_chaos(tmp_path, "--replay", str(kept), within_s=600)
    assert replayed.injected == {"kill_turn_holder"}
    assert replayed.code in (0, 2), replayed.said[
        -4_000:
    ]  # exit code 2: nothing was found, but no late attempt was refused either
