"""Decide whether a task function understands the arguments that a task gives, by their names alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec
from msgspec import Struct

ARGUMENTS: Final = "arguments"
"""The key of `tasks.needs` that lists the names of the arguments which the task gives."""


class Parameters(Struct, frozen=True):
    """The argument names that a task function `takes`, and those of them that it `requires`.

    `takes` is None for a function that takes any name. No function of this version does: a call stores the further keywords of
    `**options` under the one name `options`.
    """

    takes: tuple[str, ...] | None
    requires: tuple[str, ...] = ()

    def fits(self, given: Collection[str]) -> bool:
        """Return whether the function takes every given name and is given every name that it requires."""
        return not self.unknown(given) and not self.missing(given)

    def unknown(self, given: Collection[str]) -> tuple[str, ...]:
        """Return the given names that the function does not take."""
        return () if self.takes is None else tuple(sorted(set(given).difference(self.takes)))

    def missing(self, given: Collection[str]) -> tuple[str, ...]:
        """Return the names that the function requires and that are not given."""
        return tuple(sorted(set(self.requires).difference(given)))

    def fits_needs(self, needs: bytes | str) -> bool:
        """Return whether the function understands everything in `tasks.needs`. A requirement that is not known here never fits."""
        try:
            known = _NEEDS.decode(needs)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False
        return self.fits(known.arguments)

    def to_json(self) -> dict[str, Any]:
        """Return the form that a worker registers in `workers.metadata`."""
        return {
            "takes": None if self.takes is None else sorted(self.takes),
            "requires": sorted(self.requires),
        }


class _Needs(Struct, forbid_unknown_fields=True):
    arguments: list[str]


_NEEDS: Final = msgspec.json.Decoder(_Needs)


def given_names(arguments: bytes | str) -> frozenset[str] | None:
    """Return the names of the arguments in a stored object; None if it is not an object that can be read."""
    try:
        return frozenset(_OBJECT.decode(arguments))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
