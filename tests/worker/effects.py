"""The file of effects, to which the code of sample tasks appends from any process."""

from __future__ import annotations

from pathlib import Path


def effect(folder: str, word: object) -> None:
    """Append one line to the effects, from any process."""
    with Path(folder, "effects").open("a") as file:
        file.write(f"{word}\n")


def effects(folder: Path) -> list[str]:
    file = folder / "effects"
    return file.read_text().splitlines() if file.exists() else []
