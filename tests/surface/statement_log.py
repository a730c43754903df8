"""Read the statements that a server got from its own log, in order, by everbeat's names for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import psycopg
from msgspec import Struct

from everbeat.store.statement import source
from tests.surface.source import SOURCE

SETTINGS = {
    "log_statement": "all",
    "logging_collector": "on",
    "log_destination": "jsonlog",
    "log_directory": "log",
    "log_filename": "statements",
    "log_checkpoints": "off",
    "log_autovacuum_min_duration": "-1",
}
"""What makes a server keep such a log."""
_SAID = re.compile(r"(?:statement|execute [^:]*): (.*)", re.DOTALL)
_PLACE = re.compile(r"%%|%\((\w+)\)[sbt]|%[sbt]")
_PART = re.compile(r"^ *-- \[(\w+)\n", re.MULTILINE)


class Sent(Struct, frozen=True):
    """One statement: its file without `.sql` and its parameters as text; `transaction` tells apart those of several statements."""

    name: str
    parameters: str
    transaction: str | None


class StatementLog:
    """The log of the server in this folder."""

    def __init__(self, folder: Path, url: str) -> None:
        self._file = folder / "data" / "log" / "statements.json"
        self._url = url

    def mark(self) -> str:
        """Write a mark that `between` finds; statements answered earlier are above it."""
        mark = f"mark {uuid4()}"
        with psycopg.connect(self._url) as connection:
            connection.execute(f"select '{mark}'")
        return mark

    def between(self, first: str, last: str, *, schema: str) -> list[Sent]:
        """Return everbeat's statements for this schema between two marks."""
        give_up_at = monotonic() + 10
        while last not in (text := self._whole_lines()):
            assert monotonic() < give_up_at, f"the log has no {last}"
            sleep(0.01)  # the log collector of the server is another process
        return [*_sent(text, first, last, schema)]

    def _whole_lines(self) -> str:
        return self._file.read_text(encoding="utf-8").rpartition("\n")[0]


def _sent(text: str, first: str, last: str, schema: str) -> Iterator[Sent]:
    """Return statements in the order in which the server begins them; those of a transaction together at its commit."""
    names, open_, number = _names_by_text(schema), dict[str, list[Sent]](), 0
    begun = False
    for line in text.splitlines():
        entry = json.loads(line)
        said = _SAID.fullmatch(entry.get("message", ""))
        if said is None:
            continue
        statement, session = said[1].strip(), entry["session_id"]
        begun = begun or first in statement
        word = statement.partition(" ")[0].upper()
        if last in statement:
            return
        if not begun:
            continue
        if word == "BEGIN":
            number += 1
            open_[session] = []
        elif word in ("COMMIT", "ROLLBACK"):
            yield from open_.pop(session, ())
        elif (name := names.get(_without_space(statement))) is not None:
            parameters = entry.get("detail", "")
            if session in open_:
                open_[session].append(Sent(name, parameters, f"{session} {number}"))
            else:
                yield Sent(name, parameters, None)


@cache
def _names_by_text(schema: str) -> dict[str, str]:
    """Return the names of all statements by the text that a server gets."""
    found = {}
    for path in (SOURCE / "sql").rglob("*.sql"):
        name = path.relative_to(SOURCE / "sql").with_suffix("").as_posix()
        template = source(name)
        texts = {name: template}
        for part in sorted({*_PART.findall(template)}, reverse=True):
            texts |= {f"{each}-{part}": _without(text, part) for each, text in texts.items()}
        for each, text in texts.items():
            found[_without_space(_numbered(text, schema))] = each
    return found


def _without(template: str, part: str) -> str:
    return re.sub(rf"^ *-- \[{part}\n.*?^ *-- {part}\]\n", "", template, flags=re.MULTILINE | re.DOTALL)


def _numbered(template: str, schema: str) -> str:
    """Return the text with numbers in place of its parameters."""
    numbers: dict[str, int] = {}

    def number(place: re.Match[str]) -> str:
        if place[0] == "%%":
            return "%"
        key = place[1] or str(len(numbers))
        return f"${numbers.setdefault(key, len(numbers) + 1)}"

    filled = (
        template.replace("{schema}", f'"{schema}"')
        .replace("{concurrently}", "")
        .replace("{{", "{")
        .replace("}}", "}")
    )
    return _PLACE.sub(number, filled)


def _without_space(text: str) -> str:
    return " ".join(text.split())
