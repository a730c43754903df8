"""Import every module of the package and find every subclass of a class."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import everbeat

T = TypeVar("T")
SOURCE = Path(everbeat.__file__).parent
_PROGRAMS = re.compile(r"everbeat\.(?:.*\.)?(?:bench|demo|__main__)\b")
_MODULE_PATH = re.compile(r"\b(?:everbeat|builtins|typing|collections\.abc|datetime|uuid)\.(?:[a-z_]+\.)*")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@cache
def import_everything() -> None:
    """Import every module except programs, which make their own app and define no public names."""
    for module in pkgutil.walk_packages(everbeat.__path__, "everbeat."):
        if not _PROGRAMS.match(module.name):
            importlib.import_module(module.name)


def subclasses(kind: type[T]) -> Iterator[type[T]]:
    """Return every subclass that the package defines."""
    import_everything()
    for each in _below(kind):
        if each.__module__.startswith("everbeat"):
            yield each


def plain(text: str) -> str:
    """Return a text without module paths and addresses, which a move changes."""
    return _ADDRESS.sub("", _MODULE_PATH.sub("", text))


def _below(kind: type[T]) -> set[type[T]]:
    direct = set(kind.__subclasses__())
    return direct.union(*map(_below, direct))
