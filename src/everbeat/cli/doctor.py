"""`everbeat doctor`: shows the checks of an examination, and what to do about them."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

import typer
from rich.text import Text

from everbeat.cli.failures import ExitCode
from everbeat.cli.output import say, show_hanging, show_json
from everbeat.cli.selection import JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.domain.doctor.findings import Check, CheckVerdict
from everbeat.domain.settings.units import to_seconds
from everbeat.examination import Examination

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_STYLES: Final = {CheckVerdict.OK: "green", CheckVerdict.WARN: "yellow", CheckVerdict.FAIL: "bold red"}


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
        str, typer.Option(metavar="DURATION", help="Report transactions older than this.")
    ] = "5m",
    url: UrlOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the database and the workers, and suggest fixes.

    It changes nothing. Without an app it uses the default thresholds and retentions. The exit code is 1 if a check FAILs.
    """
    long_transaction_s = to_seconds(long_transaction, subject="--long-transaction")
    found: list[Check] = []
    with selected_app(url=url, schema=schema, locator=locator) as chosen:
        for check in Examination(chosen, long_transaction_s=long_transaction_s).checks():
            found.append(check)
            if not as_json:
                _show(check)
    worst = max((check.verdict for check in found), key=list(CheckVerdict).index)
    if as_json:
        show_json({"verdict": worst, "checks": found})
    else:
        counted = Counter(check.verdict for check in found)
        say(", ".join(f"{counted[verdict]} {verdict}" for verdict in CheckVerdict))
    if worst is CheckVerdict.FAIL:
        raise typer.Exit(ExitCode.FAILED)


def _show(check: Check) -> None:
    label = Text.assemble((f"{check.verdict:<5}", _STYLES[check.verdict]), f"{check.code:<13}")
    show_hanging(label, check.text)
    if check.fix is not None:
        show_hanging(Text(f"{'':{label.cell_len}}try: "), check.fix, style="cyan")
