"""A copy of everbeat that is one schema version ahead and runs beside this one: `python -m everbeat` with its folder as PYTHONPATH."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.architecture.source_tree import PACKAGE


def next_version(folder: Path, statements: Mapping[str, str], *, oldest_code: int | None = None) -> Path:
    """Make the copy in `folder` and return the value for PYTHONPATH; `statements` are the .sql files of the next migration by name.

    Names have the form of a migration's file, without `.sql`: "10_tasks_column". `oldest_code` is the version of the oldest code that
    works with the schema afterwards, by default that of the original.
    """
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    migrations = copy / "sql" / "schema"
    newest = max(int(each.name[:4]) for each in migrations.iterdir() if each.is_dir())
    added = migrations / f"{newest + 1:04}_synthetic"
    added.mkdir()
    (added / "oldest_code.txt").write_text(f"{oldest_code or newest}\n", encoding="utf-8")
    for name, text in statements.items():
        (added / f"{name}.sql").write_text(text, encoding="utf-8")
    return folder
