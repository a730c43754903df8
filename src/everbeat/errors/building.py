"""Errors of who builds a workflow: what is not there yet was used as if it were."""

from __future__ import annotations

from collections.abc import Iterable

from everbeat.errors.base import EverbeatError
from everbeat.errors.wording import nearest


class PlaceholderUsed(EverbeatError, TypeError):
    """Code that builds a workflow used what a node will return as if it had returned; it can only be handed on."""

    code = "PLACEHOLDER_USED"

    def __init__(self, placeholder: str, use: str, *, fix: str) -> None:
        super().__init__(
            f"{placeholder} cannot be {use} while the workflow is built: no node has run yet.", fix=f"{fix}."
        )


class NoSuchPart(EverbeatError, AttributeError, LookupError):
    """What a node returns has no such attribute, key or index, as its annotation says."""

    code = "NO_SUCH_PART"

    def __init__(
        self, placeholder: str, part: str, reason: str, *, choices: Iterable[str] = (), fix: str | None = None
    ) -> None:
        known = list(choices)
        guess = nearest(part, known)
        if guess is not None:
            fix = f"did you mean {guess}?"
        elif fix is None:
            fix = f"use one of {', '.join(known)}." if known else "hand it on as a whole."
        super().__init__(f"{placeholder} has no {part}: {reason}.", fix=fix)
