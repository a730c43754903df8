"""Test that types survive from decorator to result: both checkers accept valid calls and refuse every mistake."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FILES = [HERE / "declared.py", HERE / "accepted.py", HERE / "refused.py"]

Place = tuple[str, int]


def mypy(tmp_path: Path) -> dict[Place, str]:
    """Return the errors of strict mypy by file and line."""
    command = ["mypy", "--strict", "--no-error-summary", "--no-pretty", f"--cache-dir={tmp_path}"]
    output = _run([*command, "--explicit-package-bases", *map(str, FILES)])
    found = re.findall(r"^(.*?):(\d+): error: (.*)$", output, flags=re.MULTILINE)
    assert found, output
    return {
        (Path(file).name, int(line)): message
        for file, line, message in found
        if (ROOT / file).resolve() in FILES
    }


def pyright(tmp_path: Path) -> dict[Place, str]:
    """Return the errors of strict pyright by file and line."""
    # The project's own settings exclude the mistakes; paths in a project file must be relative to it.
    settings = {
        "include": [os.path.relpath(file, tmp_path) for file in FILES],
        "exclude": [],
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
    }
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    output = _run(["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(project)])
    found = json.loads(output)["generalDiagnostics"]
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in found
        if each["severity"] == "error"
    }


def _run(command: list[str]) -> str:
    module, *arguments = command
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed, so the types were NOT checked: pip install -e '.[dev]'")
    environment = {**os.environ, "MYPYPATH": f"{ROOT / 'src'}:{ROOT}"}
    finished = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.stdout, finished.stderr
    return finished.stdout


def _mistakes() -> set[Place]:
    lines = (HERE / "refused.py").read_text().splitlines()
    return {("refused.py", number) for number, line in enumerate(lines, 1) if "# mistake " in line}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_type_checkers_accept_the_valid_calls_and_refuse_every_mistake(
    checker: Callable[[Path], dict[Place, str]], tmp_path: Path
) -> None:
    errors = checker(tmp_path)
    mistakes = _mistakes()
    wrongly_refused = [f"{place}: {message}" for place, message in errors.items() if place not in mistakes]
    assert wrongly_refused == []
    assert mistakes - errors.keys() == set()
    assert len(mistakes) >= 27
