"""`everbeat doctor` and `everbeat workers` about NATS: a real server, and what it says of itself and of its stream."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from everbeat import App, NatsConfig
from everbeat.cli.examination import Examination
from everbeat.domain.diagnosis import Check, Verdict
from everbeat.store import messages, workers
from everbeat.wake.jetstream import check
from everbeat.wake.stream_plan import StreamPlan
from tests.cli.conftest import Command
from tests.client.conftest import app, hands
from tests.nats_server import NatsServer
from tests.store.conftest import Hands
from tests.worker.supervising import until

__all__ = ["app", "hands"]


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    """A server that is not ended by any of the tests."""
    with NatsServer() as server:
        yield server


def examined(app: App, wake: str | NatsConfig | None) -> Check:
    """What the doctor says of NATS to an app that has this wake."""
    other = App(app.door.target.url, schema=app.schema, auto_migrate=False, wake=wake)
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


def use(hands: Hands, *, holder: str | None = "w1") -> None:
    """Messages are in use, and this worker publishes."""
    channel = hands.target.channel
    hands.run(messages.use_messages(channel=channel))
    if holder is not None:
        assert hands.run(messages.hold_relay(holder, taken_ms=60_000, channel=channel))


def snapshot(hands: Hands, worker: str, messages_: str | None) -> None:
    state = workers.WorkerState(
        worker_id=worker, running=0, claimed=0, slots=1, rss_bytes=1, cpu_percent=0, loop_lag_ms=0,
        messages=messages_,
    )  # fmt: skip
    hands.run(workers.record_states([state]))


def streams(nats: NatsServer) -> list[str]:
    return list(asyncio.run(nats.ask("STREAM.NAMES", {})).get("streams") or ())


def rights(schema: str) -> Sequence[str]:
    """What the documentation says a user has to be allowed to publish to."""
    text = (Path(__file__).parents[2] / "docs" / "nats.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(
        r"A user with narrow rights needs to publish to (.*?), and to subscribe", text, re.DOTALL
    )
    return [each.replace("<schema>", schema) for each in re.findall(r"`([^`]+)`", sentence)]


class TestDoctor:
    def test_nothing_is_made_by_looking(self, app: App, nats: NatsServer) -> None:
        before = streams(nats)
        found = examined(app, nats.url)
        assert found.verdict is Verdict.OK
        assert found.text == (
            f"NATS answers at nats://{nats.address}; no worker has used it for this schema yet"
        )
        assert streams(nats) == before

    def test_without_wake_messages_are_not_in_use(self, app: App, hands: Hands) -> None:
        found = examined(app, None)
        assert (found.verdict, found.text.startswith("messages are not in use")) == (Verdict.OK, True)
        use(hands)
        snapshot(hands, "w1", '{"up": true, "relay": true}')
        found = examined(app, None)
        assert (found.verdict, "NATS tells 1 worker of tasks, w1 publishes" in found.text) == (
            Verdict.OK,
            True,
        )

    def test_what_the_stream_holds_is_told(self, app: App, hands: Hands, nats: NatsServer) -> None:
        made = make_stream(app, nats.url)
        use(hands)
        snapshot(hands, "w1", '{"up": false}')
        snapshot(hands, "w1", '{"up": true, "relay": true}')
        assert "nothing was published yet" in examined(app, nats.url).text
        asyncio.run(
            nats.ask(
                f"CONSUMER.DURABLE.CREATE.{made.stream}.{made.consumer('default')}",
                made.consumer_settings("default"),
            )
        )
        asyncio.run(nats.publish(made.subject("default"), b"1", b"2"))
        found = examined(app, nats.url)
        assert found.verdict is Verdict.OK
        assert f"stream '{made.stream}' holds 2 messages not delivered and 0 under way" in found.text
        assert "the last one came at 2" in found.text
        assert found.text.endswith("w1 publishes, NATS tells 1 worker")

    def test_nobody_publishes(self, app: App, hands: Hands, nats: NatsServer) -> None:
        make_stream(app, nats.url)
        use(hands, holder=None)
        found = examined(app, nats.url)
        assert (found.verdict, "no worker publishes" in found.text) == (Verdict.WARN, True)
        use(hands)
        assert examined(app, nats.url).verdict is Verdict.OK

    def test_messages_that_nobody_publishes_in_time(self, app: App, hands: Hands, nats: NatsServer) -> None:
        make_stream(app, nats.url)
        use(hands)
        task = hands.send()
        assert examined(app, nats.url).verdict is Verdict.OK, "it is due since a moment"
        hands.connection.execute(
            hands.plain("update {schema}.message_outbox set due_at = due_at - interval '11 s'")
        )
        found = examined(app, nats.url)
        assert found.verdict is Verdict.WARN
        assert re.match(r"1 message due and not published, for up to 1\d s", found.text)
        app.cancel(task)
        hands.connection.execute(hands.plain("delete from {schema}.message_outbox"))
        assert examined(app, nats.url).verdict is Verdict.OK

    def test_a_worker_that_is_cut_off(self, app: App, hands: Hands, nats: NatsServer) -> None:
        make_stream(app, nats.url)
        use(hands)
        snapshot(hands, "w1", '{"up": true}')
        snapshot(hands, "w2", '{"up": false}')
        found = examined(app, nats.url)
        assert (found.verdict, "1 of 2 workers" in found.text) == (Verdict.WARN, True)

    def test_a_stream_that_is_gone(self, app: App, hands: Hands, nats: NatsServer) -> None:
        use(hands)
        found = examined(app, nats.url)
        assert (found.verdict, "is gone" in found.text) == (Verdict.WARN, True)

    def test_a_stream_of_somebody_else_fails(self, app: App, nats: NatsServer) -> None:
        made = plan(app, nats.url)
        asyncio.run(nats.add_stream(made.stream, ["somebody.else"]))
        found = examined(app, nats.url)
        assert found.verdict is Verdict.FAIL
        assert found.text == (
            f"Stream '{made.stream}' at NATS server nats://{nats.address} is not used: it was not made by everbeat."
        )
        assert found.fix is not None

    def test_a_server_that_is_away_is_a_warning(self, app: App, hands: Hands) -> None:
        use(hands)
        found = examined(app, "nats://127.0.0.1:1")
        assert found.verdict is Verdict.WARN
        assert "nats://127.0.0.1:1 does not answer" in found.text
        assert "PostgreSQL tells workers" in found.text

    def test_a_server_without_jetstream_fails(self, app: App) -> None:
        with NatsServer(jetstream=False) as plain:
            found = examined(app, plain.url)
        assert (found.verdict, "has no JetStream" in found.text) == (Verdict.FAIL, True)

    def test_a_frozen_server_costs_a_few_seconds(self, app: App) -> None:
        with NatsServer() as frozen:
            frozen.freeze()
            found = examined(app, frozen.url)
            frozen.thaw()
        assert found.verdict is Verdict.FAIL  # no worker of this schema has ever used it, and none starts

    def test_a_wrong_password_fails_and_none_is_shown(self, everbeat: Command, app: App) -> None:
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

    def test_check_live_asks_nats_too(self, everbeat: Command, app: App) -> None:
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

    def test_a_missing_package_fails(self, everbeat: Command, app: App) -> None:
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
            "pip install 'everbeat[nats]', or leave wake out.",
        )


def table_of_workers(everbeat: Command) -> list[str]:
    """The lines of the table of workers, which ends at the heading of the next one."""
    lines = everbeat("workers", COLUMNS="200").assert_code(0).out.splitlines()
    return lines[: lines.index("")] if "" in lines else lines


class TestWorkers:
    def test_a_worker_that_nats_tells_of_tasks_says_so_and_the_doctor_is_content(
        self, everbeat: Command, app: App
    ) -> None:
        """With no more rights than the documentation asks for."""
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
        assert found.verdict is Verdict.OK
        assert found.text.endswith("publishes, NATS tells 1 worker")
        assert "the last one came at 2" in found.text

    def _worked(self, everbeat: Command, app: App, url: str) -> Check:
        """What the doctor says beside a worker that has run a task."""
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

    def test_a_column_says_how_it_stands_with_nats(self, everbeat: Command, app: App, hands: Hands) -> None:
        snapshot(hands, "w1", '{"up": true, "relay": true, "published": 7, "ended": {"over": 6}}')
        snapshot(hands, "w2", None)
        lines = table_of_workers(everbeat)
        assert lines[0].split()[-3:] == ["NATS", "LAST", "BEAT"]
        one, two = sorted(lines[1:])
        assert ("up, relays" in one, "up" in two) == (True, False)
        snapshot(hands, "w1", '{"up": true, "relay": false}')
        snapshot(hands, "w2", '{"up": false, "relay": false}')
        one, two = sorted(table_of_workers(everbeat)[1:])
        assert ("relays" in one, " up " in one, "away" in two) == (False, True, True)

    def test_json_and_history_have_it_too(self, everbeat: Command, app: App, hands: Hands) -> None:
        told = {"up": True, "relay": True, "published": 7, "ended": {"over": 6}}
        snapshot(hands, "w1", '{"up": true, "relay": true, "published": 7, "ended": {"over": 6}}')
        snapshot(hands, "w2", None)
        found = everbeat("workers", "--json").assert_code(0).document["workers"]
        assert {each["worker_id"]: each["snapshot"]["messages"] for each in found} == {"w1": told, "w2": None}
        (newest,) = app.worker_states("w1")
        assert newest.messages == told
        lines = everbeat("workers", "--history", "w1", COLUMNS="200").assert_code(0).out.splitlines()
        assert lines[0].split()[-1] == "NATS"
        assert lines[1].rstrip().endswith("up, relays")
