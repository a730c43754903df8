"""Reads the tables of a Markdown document, so that tests can compare them with the code."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MARK = re.compile(r"<!-- reference: (?P<name>[\w.]+) -->")


def tables(page: str) -> list[list[dict[str, str]]]:
    """Every table of a page as rows by column, `code` marks removed."""
    found: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", text_of(page), flags=re.MULTILINE):
        head, _, *rows = [_cells(line) for line in block.splitlines()]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def table(page: str, *columns: str) -> list[dict[str, str]]:
    """The one table of a page that has these columns, and no others."""
    (found,) = (each for each in tables(page) if each and tuple(each[0]) == columns)
    return found


def marked_tables(page: str) -> dict[str, list[dict[str, str]]]:
    """The tables below a line `<!-- reference: name -->`, by that name."""
    found = {}
    pieces = MARK.split(text_of(page))
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
        head, _, *rows = [_cells(line) for line in text.strip().split("\n\n")[0].splitlines()]
        found[name] = [dict(zip(head, row, strict=True)) for row in rows]
    return found


def section(page: str, heading: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    pieces = re.split(r"^## (.*)$", text_of(page), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))[heading]


def text_of(page: str) -> str:
    """A page of the guide."""
    return (DOCS / page).read_text(encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split(" | ")]
