"""Record the keys of all JSON output of commands: documents, errors and log lines, from one small scene."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from textwrap import dedent
from unittest.mock import patch

from everbeat import App
from everbeat.cli.logs import JsonFormatter
from everbeat.cli.main import main
from everbeat.demo.command import document as demo_document
from everbeat.demo.verification import verify
from everbeat.runtime.events import WorkerStarted
from everbeat.store import migrating
from everbeat.store.target import Target
from tests.bench.test_report import SAMPLES, report_of
from tests.cli.scene import Scene, played
from tests.demo.evidence import sound_evidence
from tests.store.conftest import StoreHarness
from tests.store.flows import after, task
from tests.surface.shapes import Shapes
from tests.workflows.sent import sent

SHOP = """
    from everbeat import App

    app = App()

    @app.task
    async def welcome(user_id: int, locale: str = "en") -> str:
        return f"{user_id} {locale}"
"""
WRONG = """
    from everbeat import App, WorkerConfig

    app = App(worker=WorkerConfig(processes=0))
"""


def text(url: str, schema: str) -> str:
    """Return the shapes of all documents, by command."""
    shapes = Shapes()
    with (
        _store_harness(url, schema) as db,
        closing(App(url, schema=schema)) as app,
        _programs_of_users(url, schema),
    ):
        commands = Commands(shapes)
        _errors(commands)
        _looks(commands, played(app, db))
        _workflows(commands, app, db)
        _deaths(commands, db)
        _sends(commands, db)
        _controls(commands, app, db)
    _programs(shapes)
    return shapes.text()


class Commands:
    """Runs commands with `--json` in this process and adds their output to the shapes."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def __call__(self, words: str, *values: object, title: str | None = None) -> None:
        """Run a command that writes a document; its shape stands under `title`, or under the words."""
        out, err = self._run(words, values)
        assert out, f"{words}: {err}"
        self._shapes.add(f"$ everbeat {title or words} --json", json.loads(out))

    def refused(self, words: str, *values: object) -> None:
        """Run a command that ends with an error."""
        out, err = self._run(words, values)
        assert err, f"{words}: {out}"
        self._shapes.add("errors, on stderr", json.loads(err))

    @staticmethod
    def _run(words: str, values: Sequence[object]) -> tuple[str, str]:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err), suppress(SystemExit):
            main([*words.split(), *map(str, values), "--json"])
        return out.getvalue(), err.getvalue()


@contextmanager
def _store_harness(url: str, schema: str) -> Iterator[StoreHarness]:
    target = Target.parse(url, schema=schema)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        db.supervisor("s1", "w1", "w2")
        yield db
        db.database.close()


@contextmanager
def _programs_of_users(url: str, schema: str) -> Iterator[None]:
    """Let commands find the database by the environment and apps in the current folder."""
    before = Path.cwd()
    with (
        tempfile.TemporaryDirectory(prefix="eb-") as folder,
        patch.dict(os.environ, {"EVERBEAT_DATABASE_URL": url, "EVERBEAT_SCHEMA": schema}),
        patch.object(sys, "path", [folder, *sys.path]),
    ):
        for name, code in {"recorded_shop": SHOP, "recorded_mistake": WRONG}.items():
            (Path(folder) / f"{name}.py").write_text(dedent(code), encoding="utf-8")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _looks(everbeat: Commands, scene: Scene) -> None:
    for words in scene.pages("w1"):
        everbeat(
            " ".join(words),
            title=_title(words) + (" WORKFLOW" if words == ["explain", str(scene.workflow)] else ""),
        )


def _title(words: Sequence[str]) -> str:
    """Return the command with the options that change its document; without arguments, its full name."""
    shown = [word for word in words if word.isalpha() or word in ("--history", "--status")]
    is_list = len(shown) == 1 and shown[0] in ("workers", "queues", "recoveries", "workflows")
    return " ".join([*shown, "list"] if is_list else shown)


def _deaths(everbeat: Commands, db: StoreHarness) -> None:
    """Let a tree die with one task that runs again and one that fails; a sweep recovers both."""
    db.supervisor("s3", "w3")
    retried, failed = db.running("w3", policy=b'{"on_crash": "retry"}'), db.running("w3")
    db.connection.execute(
        db.plain(
            "update {schema}.supervisors set last_beat_at = statement_timestamp() - interval '1 h' where id = 's3';"
            "update {schema}.workers set last_beat_at = statement_timestamp() - interval '1 h', started_at = statement_timestamp()"
            " - interval '1 h' where id = 'w3';"
            "update {schema}.tasks set claimed_at = statement_timestamp() - interval '1 h', started_at = statement_timestamp()"
            " - interval '1 h' where claimed_by_worker_id = 'w3'"
        )
    )
    everbeat("workers list")
    for words in ("sweep --dry-run", "sweep"):
        everbeat(words, title="sweep")
    everbeat("workers list --all", title="workers list")
    for words in ("tasks show", "explain", "recoveries list --task"):
        everbeat(words, retried.id, title=words.removesuffix(" --task"))
        everbeat(words, failed.id, title=words.removesuffix(" --task"))


def _workflows(everbeat: Commands, app: App, db: StoreHarness) -> None:
    """Run one workflow that completes, one that fails, and one that is stuck."""
    for results in ({"a": 1, "b": 2}, {"a": 1, "b": ValueError("boom")}):
        handle, flow = sent(app, db, [task("a"), task("b")], after(1, 0), output=1)
        flow.play(results.get)
        everbeat("workflows show", handle.id)
        everbeat("explain", handle.id, title="explain WORKFLOW")
    everbeat("workflows list")
    _, flow = sent(app, db, [task("a"), task("b")], after(1, 0))
    flow.end(flow.claim(), {"a": 1}.get)
    db.connection.execute(db.plain("delete from {schema}.outbox"))
    for words in ("workflows reconcile --dry-run", "workflows reconcile"):
        everbeat(words, title="workflows reconcile")


def _sends(everbeat: Commands, db: StoreHarness) -> None:
    everbeat("send", "odd", "a=1")

    def carry_out() -> None:
        while not (claimed := db.claim("w1", names=("awaited",))):
            pass  # the command has not sent it yet
        db.start(*claimed)
        db.complete(*claimed)

    worker = threading.Thread(target=carry_out)
    worker.start()
    everbeat("send --wait", "awaited", "a=1")
    worker.join()


def _controls(everbeat: Commands, app: App, db: StoreHarness) -> None:
    one, other = db.send("odd"), db.send("odd")
    everbeat("tasks cancel", one, "00000000-0000-4000-8000-000000000000")
    everbeat("tasks retry", one)
    everbeat("tasks signal", other, "approved", "{}", title="tasks signal")
    for words in ("tasks pause", "tasks resume"):
        everbeat(words, "odd", "nobody")
    for words in ("queues pause", "queues resume"):
        everbeat(words, "default", "nobody")
    handle, _ = sent(app, db, [task("a"), task("b")], after(1, 0), key="controlled")
    for words in ("workflows pause", "workflows resume", "workflows cancel", "workflows retry"):
        everbeat(words, handle.id)
    everbeat("workers quiet", "s1")
    everbeat("workers release", "w2")
    for words in ("prune --terminal-records 1", "migrate"):
        everbeat(words, title=_title(words.split()))
    for app_of_users in ("recorded_shop:app", "recorded_mistake:app"):
        everbeat("check", app_of_users)

    everbeat("db status --folder", "no-server-here", title="db status")


def _errors(everbeat: Commands) -> None:
    everbeat.refused("tasks show", "00000000-0000-4000-8000-000000000000")
    everbeat.refused("tasks list --state", "waiting")
    everbeat.refused("tasks list --limit", "-1")
    everbeat.refused("send recorded_mistake:app", "work")


def _programs(shapes: Shapes) -> None:
    """Add the output of slow measurements, written from figures made by hand."""
    evidence = sound_evidence()
    shapes.add(
        "$ everbeat demo --json",
        json.loads(json.dumps(demo_document(evidence, verify(evidence)), default=str)),
    )
    for cores in (0.02, None):
        document = report_of(SAMPLES, other_cores=cores).document()
        shapes.add("$ everbeat bench --json (its figures)", json.loads(json.dumps(document, default=str)))
    shapes.add(
        "a line of everbeat worker --log-format json", json.loads(JsonFormatter().format(_log_record()))
    )


def _log_record() -> logging.LogRecord:
    """Return a record of an event with all fields that any record can have."""
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        problem = sys.exc_info()
    record = logging.LogRecord("everbeat.worker", logging.INFO, __file__, 1, "message", None, problem)
    record.everbeat_event = WorkerStarted(worker_id="w1", pid=1)
    record.stack_info = "stack"
    return record
