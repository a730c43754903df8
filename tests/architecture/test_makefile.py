"""Test that `make` creates a missing environment and keeps an existing one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

MARKER = ".venv/.created"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a separate folder with the Makefile and its helpers."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def make(folder: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    # Without the variables of a make that runs these tests.
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    return subprocess.run(
        ["make", *targets],
        cwd=folder,
        env=kept | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
    )


def made_by_hand(folder: Path) -> Path:
    """Create an environment with a file in it and a stand-in for pip, whose installation takes seconds."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=folder, check=True)
    (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
    (packages / "pip.py").write_text("")
    mine = packages / "mine.py"
    mine.write_text("")
    return mine


def test_make_uses_and_keeps_an_existing_environment(folder: Path) -> None:
    mine = made_by_hand(folder)
    done = make(folder, MARKER)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Using .venv" in done.stdout
    assert mine.exists()
    assert make(folder, "clean").returncode == 0
    assert mine.exists()
    assert not (folder / MARKER).exists()


def test_make_does_not_remove_an_environment_that_it_never_used(folder: Path) -> None:
    mine = made_by_hand(folder)
    assert make(folder, "clean").returncode == 0
    assert mine.exists()


def test_make_rejects_an_unfit_environment_with_a_message_and_keeps_it(folder: Path) -> None:
    mine = made_by_hand(folder)
    python = folder / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")  # as an older Python answers
    python.chmod(0o755)
    done = make(folder, MARKER)
    assert done.returncode != 0
    assert "not an environment with Python 3.11 or newer" in done.stderr
    assert "make VENV=" in done.stderr
    assert mine.exists()
    assert not (folder / MARKER).exists()


@pytest.mark.long
def test_make_creates_a_missing_environment_and_cleans_it_up(folder: Path) -> None:
    done = make(folder, MARKER)
    assert done.returncode == 0, done.stderr
    assert "Making .venv" in done.stdout
    assert (folder / ".venv" / "bin" / "pip").exists()
    assert make(folder, "clean").returncode == 0
    assert not (folder / ".venv").exists()
