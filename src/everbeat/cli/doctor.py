"""`everbeat doctor`."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

import typer
from rich.text import Text

from everbeat.cli.examination import Examination
from everbeat.cli.exit_codes import ExitCode
from everbeat.cli.output import data_console, say, show_json
from everbeat.cli.selection import JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.domain.diagnosis import Check, Verdict
from everbeat.domain.duration import to_seconds
from everbeat.errors.visible import on_one_line

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_STYLES: Final = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@commands.command()
def doctor(
    locator: Annotated[
        str | None,
        typer.Argument(
            metavar="[LOCATOR]",
            help="Judge by the settings of this app: package.module:app or file.py:app.",
            show_default=False,
        ),
    ] = None,
    *,
    long_transaction: Annotated[
        str, typer.Option(metavar="DURATION", help="Call a transaction long that is older.")
    ] = "5m",
    url: UrlOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Examine the database and the workers, and say what helps.

    It only looks. Without an app the thresholds and retentions are the defaults. Exit code 1 where a check FAILs.
    """
    long_transaction_s = to_seconds(long_transaction, subject="--long-transaction")
    found: list[Check] = []
    with selected_app(url=url, schema=schema, locator=locator) as chosen:
        for check in Examination(chosen, long_transaction_s=long_transaction_s).checks():
            found.append(check)
            if not as_json:
                _show(check)
    worst = max((check.verdict for check in found), key=list(Verdict).index)
    if as_json:
        show_json({"verdict": worst, "checks": found})
    else:
        counted = Counter(check.verdict for check in found)
        say(", ".join(f"{counted[verdict]} {verdict}" for verdict in Verdict))
    if worst is Verdict.FAIL:
        raise typer.Exit(ExitCode.FAILED)


def _show(check: Check) -> None:
    style = _STYLES[check.verdict]
    console = data_console()
    console.print(Text.assemble((f"{check.verdict:<5}", style), f"{check.code:<13}", on_one_line(check.text)))
    if check.fix is not None:
        console.print(Text(f"{'':18}try: {on_one_line(check.fix)}", style="cyan"))
