"""The command `everbeat demo`.

What lives here: its options, and that it leaves nothing behind. What may not: the demo itself (`director`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Final, cast
from uuid import uuid4

import typer
from rich.console import Console

from everbeat.cli.demo.director import Director, Program
from everbeat.cli.demo.evidence import Evidence
from everbeat.cli.demo.messages import Post
from everbeat.cli.demo.plan import NATS_VARIABLE
from everbeat.cli.demo.report import document, show_verdict
from everbeat.cli.demo.source_files import FEWEST_FILES, SourceFiles, choose
from everbeat.cli.demo.verdict import judge
from everbeat.cli.demo.view import audience
from everbeat.cli.exit_codes import ExitCode
from everbeat.cli.interruption import interruptible
from everbeat.cli.locate import load
from everbeat.cli.output import VisibleConsole, show_json
from everbeat.cli.own_schema import own_schema
from everbeat.cli.selection import SCHEMA_VARIABLE, JsonOption, OwnUrlOption
from everbeat.runtime.clock import SystemClock
from everbeat.store.address import EMBEDDED, URL_VARIABLE, DatabaseAddress

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

PROGRAM: Final = "everbeat.cli.demo.tasks"


@commands.command()
def demo(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A folder or git checkout with Python files.  [default: the standard library]",
            show_default=False,
        ),
    ] = None,
    *,
    nats: Annotated[
        bool,
        typer.Option("--nats", help="Tell tasks by a NATS server of the demo's own, which is killed, too."),
    ] = False,
    headless: Annotated[bool, typer.Option("--headless", help="Show nothing before the verdict.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the schema, to look at it afterwards.")] = False,
    url: OwnUrlOption = EMBEDDED,
    as_json: JsonOption = False,
) -> None:
    """Watch workers being killed and their work being finished.

    Three trees of workers count lines, functions, classes and imports, one task a file. Meanwhile one worker process is
    killed, one tree is frozen and thawed, one tree is killed; with --nats the server that tells of tasks is killed, too. At
    the end the results in the database are compared with an independent count. Lasts at most a minute; ends with 0 only if
    every promise held. Works in a schema of its own, for which the role needs CREATE on the database.
    """
    files = _chosen(path)
    console = VisibleConsole(stderr=as_json)
    with interruptible():
        evidence = _performed(files, url=url, keep=keep, console=console, headless=headless, nats=nats)
    verdict = judge(evidence)
    if as_json:
        show_json(document(evidence, verdict))
    else:
        show_verdict(console, evidence, verdict)
    raise typer.Exit(ExitCode.OK if verdict.ok else ExitCode.FAILED)


def _chosen(path: Path | None) -> SourceFiles:
    if path is not None and not path.is_dir():
        raise typer.BadParameter(
            f"{str(path)!r} is no folder; give one with Python files.", param_hint="PATH"
        )
    files = choose(path)
    if len(files.chosen) < FEWEST_FILES:
        raise typer.BadParameter(
            f"{str(files.folder)!r} holds {len(files.chosen)} Python files of up to 1 MiB; the demo needs"
            f" {FEWEST_FILES} or more, so that each blow falls on work. Give a larger folder, or none for the"
            " standard library.",
            param_hint="PATH",
        )
    return files


def _performed(
    files: SourceFiles, *, url: str, keep: bool, console: Console, headless: bool, nats: bool
) -> Evidence:
    """The performance, and all of it cleared away however it went."""
    clock = SystemClock()
    began = clock.monotonic()
    schema = f"everbeat_demo_{uuid4().hex[:8]}"
    address = DatabaseAddress.parse(url, schema=schema, environment=os.environ)
    # The program reads its database from the environment, like any user's; here and in the workers.
    os.environ.update({URL_VARIABLE: address.portable, SCHEMA_VARIABLE: schema})
    with (
        tempfile.TemporaryDirectory(prefix="everbeat-demo-", ignore_cleanup_errors=True) as folder,
        _post(Path(folder) / "nats", schema=schema, clock=clock, wanted=nats) as post,
        _program() as program,
        audience(console, headless=headless) as watching,
        own_schema(program.app, keep=keep),
    ):
        director = Director(
            program,
            files,
            audience=watching,
            environment=os.environ,
            folder=Path(folder),
            clock=clock,
            began=began,
            post=post,
        )
        with closing(director):
            return director.perform()


@contextmanager
def _program() -> Iterator[Program]:
    program = cast(Program, load(PROGRAM))
    with closing(program.app):
        yield program


@contextmanager
def _post(folder: Path, *, schema: str, clock: SystemClock, wanted: bool) -> Iterator[Post | None]:
    """A NATS server that the program, here and in the workers, knows of; none if it is not wanted. Raises a NatsError."""
    if not wanted:
        os.environ.pop(NATS_VARIABLE, None)
        yield None
        return
    with closing(Post(folder, schema=schema, clock=clock)) as post:
        post.start()
        os.environ[NATS_VARIABLE] = post.url
        yield post
