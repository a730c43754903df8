"""Test that the import contracts of pyproject.toml hold, and that they find a forbidden import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

ROOMS = [
    "_top_level",
    "app",
    "assembly",
    "bench",
    "cli",
    "client",
    "config",
    "demo",
    "domain",
    "embedded",
    "errors",
    "examination",
    "hints",
    "in_process",
    "inspection",
    "logging",
    "maintenance",
    "metrics",
    "middleware",
    "nats",
    "otel",
    "protocol",
    "recovering",
    "recovery",
    "runtime",
    "sentry",
    "store",
    "supervisor",
    "testing",
    "tracing",
    "web",
    "worker",
    "workflows",
]


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-cache",
        ],
        cwd=source.parent,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Return an everbeat of empty packages under the project's contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    plant(tmp_path / "src", "__init__.py", "")
    for room in ROOMS:
        plant(tmp_path / "src", f"{room}/__init__.py", "")
    return tmp_path / "src"


def plant(source: Path, module: str, code: str) -> None:
    path = source / "everbeat" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{code}\n", encoding="utf-8")


def test_the_source_keeps_the_import_contracts() -> None:
    checked = lint_imports(ROOT / "src")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("module", "code", "broken"),
    [
        ("domain/__init__.py", "import everbeat.store", "Imports go only downward"),
        ("worker/__init__.py", "import everbeat.client", "Imports go only downward"),
        ("store/__init__.py", "import everbeat.hints", "Imports go only downward"),
        ("domain/__init__.py", "import asyncio", "The domain is pure"),
        ("recovering/__init__.py", "import psycopg", "Only store, hints, embedded and nats open connections"),
        ("client/__init__.py", "import typer", "Terminal libraries stay in the CLI"),
    ],
)
def test_an_import_that_breaks_a_contract_is_found(house: Path, module: str, code: str, broken: str) -> None:
    plant(house, module, code)
    checked = lint_imports(house)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert f"{broken} BROKEN" in checked.stdout


def test_downward_imports_keep_the_contracts(house: Path) -> None:
    plant(
        house, "app/__init__.py", "import everbeat.client, everbeat.worker, everbeat.store, everbeat.errors"
    )
    plant(house, "store/__init__.py", "import psycopg, everbeat.domain")
    checked = lint_imports(house)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_module_outside_every_package_is_found(house: Path) -> None:
    plant(house, "attic.py", "")
    checked = lint_imports(house)
    assert checked.returncode == 1
    assert "attic" in checked.stdout
