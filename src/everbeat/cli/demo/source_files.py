"""Which files the demo works on: Python files below a folder, a sample of them where there are many.

What lives here: finding and choosing files. What may not: reading them.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_FILES: Final = 400
FEWEST_FILES: Final = 3
LARGEST_BYTES: Final = 1 << 20

_NOT_SOURCE: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test"})
_GIT_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """The files chosen below `folder`, absolute and in order; `found` counts what there was to choose from."""

    folder: Path
    found: int
    chosen: tuple[str, ...]


def choose(folder: Path | None) -> SourceFiles:
    """The files below a folder, by git where it is a checkout; None takes the standard library without its tests.

    More than MOST_FILES are sampled evenly, the same ones each time. Left out: files above 1 MiB, what is no regular
    file, names that are not UTF-8.
    """
    if folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = list(_walk(root, leave_out=_NOT_SOURCE | _NOT_LIBRARY))
    else:
        root = folder.absolute()
        paths = _listed_by_git(root) or list(_walk(root, leave_out=_NOT_SOURCE))
    fitting = sorted({path for path in paths if _fits(path)})
    return SourceFiles(folder=root, found=len(fitting), chosen=tuple(_sample(fitting, most=MOST_FILES)))


def _walk(root: Path, *, leave_out: frozenset[str]) -> Iterator[str]:
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name not in leave_out and not name.startswith("."))
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))  # noqa: PTH118 - 10,000 of them


def _listed_by_git(root: Path) -> list[str]:
    """What git would have in a commit; nothing where there is no git or no checkout."""
    command = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        "*.py",
    ]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=_GIT_PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    names = asked.stdout.split(b"\0") if asked.returncode == 0 else []
    return [str(root / os.fsdecode(name)) for name in names if name]


def _fits(path: str) -> bool:
    try:
        path.encode()
        found = os.stat(path)  # noqa: PTH116 - 10,000 of them
    except (OSError, UnicodeError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST_BYTES


def _sample(paths: Sequence[str], *, most: int) -> Sequence[str]:
    if len(paths) <= most:
        return paths
    return [paths[place * len(paths) // most] for place in range(most)]
