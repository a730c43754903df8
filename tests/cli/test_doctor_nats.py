"""Test what `everbeat doctor` and `everbeat workers` report about a real NATS server and its stream."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from everbeat import App, NatsConfig
from everbeat.client.database_access import database_of
from everbeat.domain.doctor.findings import Check, CheckVerdict
from everbeat.examination import Examination
from everbeat.nats.jetstream import check
from everbeat.nats.stream_plan import StreamPlan
from everbeat.store import messages, workers
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.nats_server import NatsServer
from tests.store.conftest import StoreHarness
from tests.supervisor.supervising import until

__all__ = ["app", "db"]


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    """Yield a server that no test ends."""
    with NatsServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _without_streams(nats: NatsServer) -> None:
    """Delete the streams of other tests, so that these tests can run in any order."""
    for name in streams(nats):
        asyncio.run(nats.ask(f"STREAM.DELETE.{name}", {}))


def examined(app: App, wake: str | NatsConfig | None) -> Check:
    """Return the NATS check of the doctor for an app with this wake setting."""
    other = App(database_of(app).target.url, schema=app.schema, auto_migrate=False, wake=wake)
    try:
        (found,) = [
            each for each in Examination(other, long_transaction_s=300).checks() if each.code == "NATS"
        ]
        return found
    finally:
        other.close()


def plan(app: App, url: str, **settings: object) -> StreamPlan:
    config = replace(NatsConfig(servers=[url]), **settings)  # type: ignore[arg-type]
    return StreamPlan(app.schema, config, 600.0)


def make_stream(app: App, url: str) -> StreamPlan:
    made = plan(app, url)
    asyncio.run(check(made, made.config))
    return made


def use(db: StoreHarness, *, holder: str | None = "w1") -> None:
    """Mark messages as in use, with this worker as their publisher."""
    channel = db.target.channel
    db.run(messages.use_messages(channel=channel))
    if holder is not None:
        assert db.run(messages.hold_relay(holder, taken_ms=60_000, channel=channel))


def snapshot(db: StoreHarness, worker: str, messages_: str | None) -> None:
    state = workers.WorkerState(
        worker_id=worker, running=0, claimed=0, slots=1, rss_bytes=1, cpu_percent=0, loop_lag_ms=0,
        messages=messages_,
    )  # fmt: skip
    db.run(workers.record_states([state]))


def streams(nats: NatsServer) -> list[str]:
    return list(asyncio.run(nats.ask("STREAM.NAMES", {})).get("streams") or ())


def rights(schema: str) -> Sequence[str]:
    """Return the subjects that the documentation requires a user to publish to."""
    text = (Path(__file__).parents[2] / "docs" / "nats.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(
        r"A user with narrow rights needs to publish to (.*?), and to subscribe", text, re.DOTALL
    )
    return [each.replace("<schema>", schema) for each in re.findall(r"`([^`]+)`", sentence)]


class TestDoctor:
    def test_doctor_creates_nothing_in_nats(self, app: App, nats: NatsServer) -> None:
        before = streams(nats)
        found = examined(app, nats.url)
        assert found.verdict is CheckVerdict.OK
        assert found.text == (
            f"NATS answers at nats://{nats.address}; no worker has used it for this schema yet"
        )
        assert streams(nats) == before

    def test_doctor_reports_that_nats_is_not_in_use_without_a_wake_setting(
        self, app: App, db: StoreHarness
    ) -> None:
        found = examined(app, None)
        assert (found.verdict, found.text.startswith("NATS is not in use")) == (CheckVerdict.OK, True)
        use(db)
        snapshot(db, "w1", '{"up": true, "relay": true}')
        found = examined(app, None)
        assert (found.verdict, "NATS notifies 1 worker of tasks, w1 publishes" in found.text) == (
            CheckVerdict.OK,
            True,
        )

    def test_doctor_reports_the_messages_in_the_stream(
        self, app: App, db: StoreHarness, nats: NatsServer
    ) -> None:
        made = make_stream(app, nats.url)
        use(db)
        snapshot(db, "w1", '{"up": false}')
        snapshot(db, "w1", '{"up": true, "relay": true}')
        assert "no message was published yet" in examined(app, nats.url).text
        asyncio.run(
            nats.ask(
                f"CONSUMER.DURABLE.CREATE.{made.stream}.{made.consumer('default')}",
                made.consumer_settings("default"),
            )
        )
        asyncio.run(nats.publish(made.subject("default"), b"1", b"2"))
        found = examined(app, nats.url)
        assert found.verdict is CheckVerdict.OK
        assert f"stream '{made.stream}' holds 2 messages not delivered and 0 in progress" in found.text
        assert "the last one came at 2" in found.text
        assert found.text.endswith("w1 publishes, NATS notifies 1 worker")

    def test_doctor_reports_that_no_worker_publishes_messages(
        self, app: App, db: StoreHarness, nats: NatsServer
    ) -> None:
        make_stream(app, nats.url)
        use(db, holder=None)
        found = examined(app, nats.url)
        assert (found.verdict, "no worker publishes" in found.text) == (CheckVerdict.WARN, True)
        use(db)
        assert examined(app, nats.url).verdict is CheckVerdict.OK

    def test_doctor_reports_messages_that_are_published_late(
        self, app: App, db: StoreHarness, nats: NatsServer
    ) -> None:
        make_stream(app, nats.url)
        use(db)
        task = db.send()
        assert examined(app, nats.url).verdict is CheckVerdict.OK, "it has been due for only a moment"
        db.connection.execute(
            db.plain("update {schema}.message_outbox set due_at = due_at - interval '11 s'")
        )
        found = examined(app, nats.url)
        assert found.verdict is CheckVerdict.WARN
        assert re.match(r"1 message due and not published, for up to 1\d s", found.text)
        app.cancel(task)
        db.connection.execute(db.plain("delete from {schema}.message_outbox"))
        assert examined(app, nats.url).verdict is CheckVerdict.OK

    def test_doctor_reports_a_worker_that_is_cut_off_from_nats(
        self, app: App, db: StoreHarness, nats: NatsServer
    ) -> None:
        make_stream(app, nats.url)
        use(db)
        snapshot(db, "w1", '{"up": true}')
        snapshot(db, "w2", '{"up": false}')
        found = examined(app, nats.url)
        assert (found.verdict, "1 of 2 workers" in found.text) == (CheckVerdict.WARN, True)

    def test_doctor_reports_a_missing_stream(self, app: App, db: StoreHarness, nats: NatsServer) -> None:
        use(db)
        found = examined(app, nats.url)
        assert (found.verdict, "does not exist" in found.text) == (CheckVerdict.WARN, True)

    def test_doctor_fails_for_a_stream_that_everbeat_did_not_create(self, app: App, nats: NatsServer) -> None:
        made = plan(app, nats.url)
        asyncio.run(nats.add_stream(made.stream, ["somebody.else"]))
        found = examined(app, nats.url)
        assert found.verdict is CheckVerdict.FAIL
        assert found.text == (
            f"Stream '{made.stream}' at NATS server nats://{nats.address} is not used: everbeat did not create it."
        )
        assert found.fix is not None

    def test_doctor_warns_about_an_unreachable_nats_server(self, app: App, db: StoreHarness) -> None:
        use(db)
        found = examined(app, "nats://127.0.0.1:1")
        assert found.verdict is CheckVerdict.WARN
        assert "nats://127.0.0.1:1 does not answer" in found.text
        assert "PostgreSQL notifies workers" in found.text

    def test_doctor_fails_for_a_nats_server_without_jetstream(self, app: App) -> None:
        with NatsServer(jetstream=False) as plain:
            found = examined(app, plain.url)
        assert (found.verdict, "has no JetStream" in found.text) == (CheckVerdict.FAIL, True)

    def test_doctor_waits_only_a_few_seconds_for_a_frozen_nats_server(self, app: App) -> None:
        with NatsServer() as frozen:
            frozen.freeze()
            found = examined(app, frozen.url)
            frozen.thaw()
        assert (
            found.verdict is CheckVerdict.FAIL
        )  # no worker of this schema has ever used it, and none starts

    def test_doctor_fails_for_a_wrong_nats_password_and_does_not_show_it(
        self, everbeat: Command, app: App
    ) -> None:
        with NatsServer(user="worker", password="hunter2") as strict:
            wrong = strict.url.replace("hunter2", "hunter3")
            for url, code, verdict in ((wrong, 1, "FAIL"), (strict.url, 0, "OK")):
                everbeat.write(
                    f"carried_{code}.py",
                    f"""
                    from everbeat import App
                    app = App(schema={app.schema!r}, wake={url!r})
                    """,
                )
                answer = everbeat("doctor", f"carried_{code}:app", "--json").assert_code(code)
                (found,) = [each for each in answer.document["checks"] if each["code"] == "NATS"]
                assert found["verdict"] == verdict
                assert "hunter" not in answer.out + answer.err
                told = everbeat("doctor", f"carried_{code}:app")
                assert "hunter" not in told.out + told.err

    def test_check_live_also_checks_nats(self, everbeat: Command, app: App) -> None:
        program = f"""
            from everbeat import App
            app = App(schema={app.schema!r}, wake=%r)
            @app.task
            async def work() -> None: ...
            """
        with NatsServer() as server:
            everbeat.write("told.py", program % server.url)
            assert "NATS answers" in everbeat("check", "told:app", "--live").assert_code(0).err
        everbeat.write("deaf.py", program % server.url)
        assert "does not answer" in everbeat("check", "deaf:app", "--live").assert_code(1).out

    def test_doctor_fails_if_the_nats_package_is_missing(self, everbeat: Command, app: App) -> None:
        everbeat.write(
            "carried.py",
            f"""
            import sys
            from everbeat import App

            class NotInstalled:
                @staticmethod
                def find_spec(name, *_):
                    if name == "nats":
                        raise ModuleNotFoundError("No module named 'nats'", name="nats")

            sys.meta_path.insert(0, NotInstalled)
            app = App(schema={app.schema!r}, wake="nats://127.0.0.1:1")
            """,
        )
        answer = everbeat("doctor", "carried:app", "--json").assert_code(1)
        (found,) = [each for each in answer.document["checks"] if each["code"] == "NATS"]
        assert (found["verdict"], found["fix"]) == (
            "FAIL",
            "run pip install 'everbeat[nats]', or omit wake.",
        )


def table_of_workers(everbeat: Command) -> list[str]:
    """Return the lines of the table of workers, which ends at the next heading."""
    lines = everbeat("workers", COLUMNS="200").assert_code(0).out.splitlines()
    return lines[: lines.index("")] if "" in lines else lines


class TestWorkers:
    def test_doctor_accepts_a_nats_worker_with_the_documented_permissions(
        self, everbeat: Command, app: App
    ) -> None:
        """The user has only the permissions that the documentation requires."""
        allowed = ", ".join(f'"{each}"' for each in rights(app.schema))
        narrow = f"""
            authorization {{ users: [ {{
                user: "narrow", password: "pw",
                permissions: {{ publish: {{ allow: [{allowed}] }}, subscribe: {{ allow: ["_INBOX.>"] }} }}
            }} ] }}
        """
        with NatsServer(extra=narrow) as nats:
            url = nats.url.replace("//", "//narrow:pw@")
            found = self._worked(everbeat, app, url)
            assert "Violation" not in nats.log
        assert found.verdict is CheckVerdict.OK
        assert found.text.endswith("publishes, NATS notifies 1 worker")
        assert "the last one came at 2" in found.text

    def _worked(self, everbeat: Command, app: App, url: str) -> Check:
        """Return the NATS check of the doctor while a worker runs that has completed a task."""
        everbeat.write(
            "carried.py",
            f"""
            from everbeat import App, RecoveryConfig
            app = App(
                schema={app.schema!r}, wake={url!r}, recovery=RecoveryConfig(worker_state_snapshot_interval_ms=1_000)
            )

            @app.task
            def double(number: int) -> int:
                return 2 * number
            """,
        )
        process = subprocess.Popen(
            everbeat.argv("worker", "carried:app", "--processes", "1"), cwd=everbeat.folder, env=everbeat.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until(lambda: any((each.messages or {}).get("relay") for each in app.worker_states()))
            everbeat("send", "carried:app", "double", "number=21", "--wait").assert_code(0)
            until(lambda: any((each.messages or {})["ended"] for each in app.worker_states()))
            assert "up, relays" in everbeat("workers", COLUMNS="200").out
            return examined(app, url)
        finally:
            process.kill()
            process.wait()

    def test_the_workers_command_has_a_column_with_the_state_of_nats(
        self, everbeat: Command, app: App, db: StoreHarness
    ) -> None:
        snapshot(db, "w1", '{"up": true, "relay": true, "published": 7, "ended": {"over": 6}}')
        snapshot(db, "w2", None)
        lines = table_of_workers(everbeat)
        assert lines[0].split()[-3:] == ["NATS", "LAST", "BEAT"]
        one, two = sorted(lines[1:])
        assert ("up, relays" in one, "up" in two) == (True, False)
        snapshot(db, "w1", '{"up": true, "relay": false}')
        snapshot(db, "w2", '{"up": false, "relay": false}')
        one, two = sorted(table_of_workers(everbeat)[1:])
        assert ("relays" in one, " up " in one, "away" in two) == (False, True, True)

    def test_the_json_and_the_history_of_workers_have_the_state_of_nats(
        self, everbeat: Command, app: App, db: StoreHarness
    ) -> None:
        told = {"up": True, "relay": True, "published": 7, "ended": {"over": 6}}
        snapshot(db, "w1", '{"up": true, "relay": true, "published": 7, "ended": {"over": 6}}')
        snapshot(db, "w2", None)
        found = everbeat("workers", "--json").assert_code(0).document["workers"]
        assert {each["worker_id"]: each["snapshot"]["messages"] for each in found} == {"w1": told, "w2": None}
        (newest,) = app.worker_states("w1")
        assert newest.messages == told
        lines = everbeat("workers", "--history", "w1", COLUMNS="200").assert_code(0).out.splitlines()
        assert lines[0].split()[-1] == "NATS"
        assert lines[1].rstrip().endswith("up, relays")
