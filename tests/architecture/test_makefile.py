"""`make` makes an environment where there is none, and leaves one that somebody else made as it is."""

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
    """The Makefile and its helpers, in a folder of their own."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def make(folder: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    # Not the environment of a make that runs these tests.
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
    """An environment with something in it; a stand-in for pip, which takes seconds to put there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=folder, check=True)
    (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
    (packages / "pip.py").write_text("")
    mine = packages / "mine.py"
    mine.write_text("")
    return mine


def test_an_environment_that_is_there_is_used_and_kept(folder: Path) -> None:
    mine = made_by_hand(folder)
    done = make(folder, MARKER)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Using .venv" in done.stdout
    assert mine.exists()
    assert make(folder, "clean").returncode == 0
    assert mine.exists()
    assert not (folder / MARKER).exists()


def test_one_that_was_never_used_by_make_is_not_removed_either(folder: Path) -> None:
    mine = made_by_hand(folder)
    assert make(folder, "clean").returncode == 0
    assert mine.exists()


def test_one_that_does_not_fit_is_refused_in_words_and_kept(folder: Path) -> None:
    mine = made_by_hand(folder)
    python = folder / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")  # as an older Python answers
    python.chmod(0o755)
    done = make(folder, MARKER)
    assert done.returncode != 0
    assert "no environment with Python 3.11 or newer" in done.stderr
    assert "make VENV=" in done.stderr
    assert mine.exists()
    assert not (folder / MARKER).exists()


def test_where_there_is_none_one_is_made_and_cleaned_up(folder: Path) -> None:
    done = make(folder, MARKER)
    assert done.returncode == 0, done.stderr
    assert "Making .venv" in done.stdout
    assert (folder / ".venv" / "bin" / "pip").exists()
    assert make(folder, "clean").returncode == 0
    assert not (folder / ".venv").exists()
