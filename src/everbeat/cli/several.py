"""One command over several names: each is tried, what is refused is told and the others go on.

What lives here: the going through. What may not: what is done to one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer
from msgspec import Struct

from everbeat.cli.exit_codes import ExitCode, exit_code_of
from everbeat.cli.failures import failure_document, show_failure
from everbeat.cli.output import show_json
from everbeat.errors import EverbeatError
from everbeat.errors.visible import on_one_line


class Done(Struct, frozen=True):
    """What was done to one name, for programs and for people; `aside` is no data."""

    document: object
    line: str
    aside: str | None = None


def for_each(
    names: Sequence[str],
    act: Callable[[str], Done],
    *,
    refusals: tuple[type[EverbeatError], ...],
    key: str,
    listed_as: str,
    as_json: bool,
) -> NoReturn:
    """Does it to each name, and ends the command with the worst exit code; one that is refused keeps no other from its turn."""
    documents: list[object] = []
    worst = ExitCode.OK
    for name in names:
        try:
            done = act(name)
        except refusals as error:
            worst = max(worst, exit_code_of(error))
            documents.append({key: name, "error": failure_document(error)})
            if not as_json:
                show_failure(error, as_json=False)
            continue
        documents.append(done.document)
        if not as_json:
            print(on_one_line(done.line))
            if done.aside is not None:
                print(on_one_line(done.aside), file=sys.stderr)
    if as_json:
        show_json({listed_as: documents})
    raise typer.Exit(worst)
