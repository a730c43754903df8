"""A record: a file with one part of the public surface, compared with the present one."""

from __future__ import annotations

from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

from msgspec import Struct

FOLDER = Path(__file__).parent / "records"
REMEDY = (
    "if the change is meant, renew the record and name it in CHANGELOG.md: .venv/bin/python -m tests.surface"
)


class Record(Struct, frozen=True):
    """One file of `records` and the function that writes its present text."""

    name: str
    present: Callable[[], str]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    def renew(self) -> bool:
        """Write the present text; return whether the file changed."""
        text = self.present()
        if self.path.exists() and self.path.read_text(encoding="utf-8") == text:
            return False
        self.path.write_text(text, encoding="utf-8")
        return True

    def difference(self) -> str:
        """Return the difference between the present text and the record, with the remedy; empty if there is none."""
        return difference(self.name, recorded=self.path.read_text(encoding="utf-8"), present=self.present())


def difference(name: str, *, recorded: str, present: str) -> str:
    """Return a unified diff of two texts and the remedy; empty if they are the same."""
    lines = unified_diff(
        recorded.splitlines(), present.splitlines(), f"recorded/{name}", f"present/{name}", lineterm=""
    )
    text = "\n".join(lines)
    return f"{text}\n\n{REMEDY} {name}" if text else ""
