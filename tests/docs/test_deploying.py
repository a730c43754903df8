"""The manifests of the page about deploying: what they say fits what the code does, and the tools of their readers accept them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from everbeat.config import WorkerConfig
from everbeat.domain.settings.units import to_seconds
from tests.docs.tables import section

PAGE = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text(encoding="utf-8")
MARGIN_S = 5.0
"""What the page says that a supervisor needs beyond its grace."""


def block(language: str) -> str:
    """The one block of this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def grace_s(command: str) -> float:
    found = re.search(r"--grace\W+(\w+)", command)
    assert found is not None
    return to_seconds(found[1], subject="--grace")


def test_the_kubernetes_manifest_allows_the_grace_period_enough_time() -> None:  # J1
    manifest = block("yaml")
    found = re.search(r"terminationGracePeriodSeconds: (\d+)", manifest)
    assert found is not None
    assert int(found[1]) >= grace_s(manifest) + MARGIN_S
    assert grace_s(manifest) == WorkerConfig().grace_s


def test_the_systemd_unit_allows_the_grace_period_enough_time() -> None:  # J1
    unit = block("ini")
    found = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert found is not None
    assert int(found[1]) >= grace_s(unit) + MARGIN_S


@pytest.mark.parametrize(
    ("options", "database", "code"),
    [
        (["broken:app"], "postgresql:///none", 1),
        (["shop:app", "--grace", "soon"], "postgresql:///none", 2),
        (["shop:app"], "postgresql://127.0.0.1:1/none", 3),
        (["nothing:app"], "postgresql:///none", 4),
    ],
)
def test_a_worker_that_cannot_start_ends_with_a_documented_exit_code(
    options: list[str], database: str, code: int, tmp_path: Path
) -> None:  # J1
    task = "from everbeat import App\napp = App()\n@app.task\ndef work() -> None: ...\n"
    (tmp_path / "shop.py").write_text(task)
    (tmp_path / "broken.py").write_text("raise ValueError")
    done = subprocess.run(
        [sys.executable, "-m", "everbeat", "worker", *options],
        cwd=tmp_path, env=os.environ | {"EVERBEAT_DATABASE_URL": database}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert re.search(rf"^\| {code} \| ", section("deploying.md", "What a stop does"), flags=re.MULTILINE)


def test_systemd_accepts_the_documented_unit(tmp_path: Path) -> None:  # J1
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: nothing here can read unit files")
    unit = tmp_path / "shop.service"
    # The program, the user and the file of the example exist on no other machine.
    unit.write_text(
        block("ini")
        .replace("/srv/shop/.venv/bin/everbeat", "/bin/true")
        .replace("WorkingDirectory=/srv/shop", "WorkingDirectory=/")
        .replace("User=shop\n", "")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in done.stderr.splitlines() if "shop.service" in line]
    assert (done.returncode, said) == (0, [])
