"""Describe the shape of JSON documents: every path with the types of the values found there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from uuid import UUID

_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d.*")


class Shapes:
    """The paths and types of all documents of each title."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def add(self, title: str, document: object) -> None:
        """Add the paths and types of one document."""
        for path, kind in _walked("", document):
            self._seen[title][path].add(kind)

    def text(self) -> str:
        """Return a block for each title, in the order in which they came."""
        return "\n".join(
            f"{title}\n"
            + "".join(f"  {path}: {' | '.join(sorted(kinds))}\n" for path, kinds in sorted(paths.items()))
            for title, paths in self._seen.items()
        )


def _walked(path: str, value: object) -> Iterator[tuple[str, str]]:
    if path:
        yield path, kind_of(value)
    match value:
        case dict():
            for key, below in value.items():
                yield from _walked(f"{path}.{key}" if path else key, below)
        case list():
            for below in value:
                yield from _walked(f"{path}[]", below)


def kind_of(value: Any) -> str:
    """Return the word for the type of a JSON value; times and ids are distinguished from other text."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "time" if _TIME.fullmatch(value) else "id" if _is_id(value) else "text"
        case list():
            return "array"
        case _:
            return "object"


def _is_id(value: str) -> bool:
    try:
        return str(UUID(value)) == value
    except ValueError:
        return False
