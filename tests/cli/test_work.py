"""Test the everyday commands of an operator with a real worker that the command started."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from time import monotonic, sleep
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.cli.failures import ExitCode
from tests.cli.conftest import Answer, Command, RunningWorker
from tests.variants import every_nth_quick

pytestmark = [pytest.mark.story, pytest.mark.usefixtures("migrated")]

MORE_INVALID_OPTIONS = (("--grace", "soon"), ("--log-level", "loud"), ("--threads", "many"))


def until(ask: Callable[[], Answer], holds: Callable[[Answer], bool], *, within_s: float = 30) -> Answer:
    """Repeat a command until its answer is as expected."""
    give_up_at = monotonic() + within_s
    while not holds(answer := ask()):
        assert monotonic() < give_up_at, f"stdout:\n{answer.out}\nstderr:\n{answer.err}"
        sleep(0.1)  # the other process sends no event
    return answer


def state_of(everbeat: Command, task_id: str) -> Callable[[], Answer]:
    return lambda: everbeat("tasks", "show", task_id, "--json")


def test_commands_send_run_and_show_a_task(everbeat: Command, shop_worker: RunningWorker) -> None:
    sent = everbeat(
        "send", "shop:app", "welcome", "user_id=42", "--wait", "--wait-timeout", "40s"
    ).assert_code(0)
    assert sent.out == '"42 en"\n'

    document = everbeat(
        "send", "shop", "welcome", "--args", '{"user_id": 7}', "locale=12", "--wait", "--json"
    )
    task = document.assert_code(0).document
    assert (task["state"], task["result"]) == ("COMPLETED", "7 12")
    assert task["sent_at"] <= task["claimed_at"] <= task["started_at"] <= task["completed_at"]

    shown = everbeat("tasks", "show", task["id"]).assert_code(0)
    assert "COMPLETED" in shown.out
    assert '"7 12"' in shown.out

    workers = everbeat("workers", "--json").assert_code(0).document["workers"]
    assert [worker["worker_id"] for worker in workers] == [task["claimed_by_worker_id"]]
    assert not workers[0]["is_stale"]
    table = everbeat("workers").assert_code(0).out
    assert "live" in table
    assert workers[0]["worker_id"] in table

    shop_worker.process.send_signal(signal.SIGTERM)
    assert shop_worker.process.wait(timeout=30) == 0
    log = shop_worker.log.read_text()
    assert "worker_started" in log
    assert "Traceback" not in log
    ended = everbeat("workers", "--all", "--json").assert_code(0).document["workers"]
    assert [worker["ended_at"] is not None for worker in ended] == [True]
    history = everbeat("workers", "--history", ended[0]["worker_id"], "--json").assert_code(0).document
    assert history["worker_id"] == ended[0]["worker_id"]


BLOCKED = """
    import asyncio
    import time
    from everbeat import App, RecoveryConfig

    app = App(recovery=RecoveryConfig(worker_state_snapshot_interval_ms=1_000))

    @app.task
    async def block(seconds: float) -> None:
        await asyncio.sleep(1.5)  # so that the worker has ticked before
        time.sleep(seconds)  # blocks the loop, which is the point
"""


def test_the_workers_command_shows_a_blocked_event_loop_while_it_lasts(
    everbeat: Command, schema: str
) -> None:
    everbeat.write("blocked.py", BLOCKED.replace("App(", f"App(schema={schema!r}, "))
    task_id = everbeat("send", "blocked:app", "block", "seconds=30").assert_code(0).out.strip()
    worker = subprocess.Popen(
        everbeat.argv("worker", "blocked:app", "--grace", "1s"),
        cwd=everbeat.folder,
        env=everbeat.environment,
        stdin=subprocess.DEVNULL,
    )
    try:

        def lag_ms(answer: Answer) -> float:
            lags = [
                each["snapshot"]["loop_lag_ms"] for each in answer.document["workers"] if each["snapshot"]
            ]
            return max(lags, default=0.0)

        until(lambda: everbeat("workers", "--json"), lambda answer: lag_ms(answer) > 2_000)
        assert state_of(everbeat, task_id)().document["state"] == "RUNNING", (
            "the block was shown while it lasted"
        )
    finally:
        worker.kill()
        worker.wait(timeout=10)


def test_commands_show_a_failure_and_cancel_and_retry_tasks(
    everbeat: Command, shop_worker: RunningWorker
) -> None:
    failed = everbeat("send", "shop", "refuse", "reason=closed", "--wait", "--wait-timeout", "40s")
    failed.assert_code(ExitCode.FAILED)
    assert "REFUSED: closed" in failed.err
    task_id = failed.err.split("Sent ")[1].split(".")[0]
    listed = everbeat("tasks", "list", "--state", "failed", "--json").assert_code(0).document["tasks"]
    assert [(task["id"], task["error"]["code"]) for task in listed] == [(task_id, "REFUSED")]
    assert "REFUSED: closed" in everbeat("tasks", "list").assert_code(0).out

    assert "runs again" in everbeat("tasks", "retry", task_id).assert_code(0).out
    until(state_of(everbeat, task_id), lambda answer: len(answer.document["attempts"]) == 2)
    assert "Attempts" in everbeat("tasks", "show", task_id).assert_code(0).out

    running = everbeat("send", "shop", "slow", "seconds=30").assert_code(0).out.strip()
    until(state_of(everbeat, running), lambda answer: answer.document["state"] == "RUNNING")
    beat = everbeat("tasks", "show", running, "--json").document["heartbeat"]
    assert (beat["role"], beat["task_id"]) == ("runner", running)  # D2
    cancelled = everbeat("tasks", "cancel", running, task_id, "--json").assert_code(0).document["tasks"]
    assert [each["verdict"] for each in cancelled] == ["REQUESTED", "ALREADY_ENDED"]


def test_the_sweep_command_recovers_tasks_of_a_killed_worker(
    everbeat: Command, shop_worker: RunningWorker
) -> None:
    task_id = everbeat("send", "shop", "slow", "seconds=60").assert_code(0).out.strip()
    until(state_of(everbeat, task_id), lambda answer: answer.document["state"] == "RUNNING")
    shop_worker.process.kill()
    shop_worker.process.wait(timeout=10)
    refusal = everbeat("sweep", "--threshold", "1s", "--json").assert_code(ExitCode.USAGE).error
    assert "at least two heartbeat intervals (1m)" in refusal["message"]
    long_ago(everbeat)

    def rehearse() -> Answer:
        return everbeat("sweep", "--dry-run", "--threshold", "60s", "--json").assert_code(0)

    rehearsal = until(rehearse, lambda answer: answer.document["tasks"] != []).document  # F2
    assert [task["id"] for task in rehearsal["tasks"]] == [task_id]
    assert rehearsal["dry_run"] is True
    assert rehearsal["recovered_count"] == 0
    assert state_of(everbeat, task_id)().document["state"] == "RUNNING"

    swept = everbeat("sweep", "--threshold", "60s", "--json").assert_code(0).document
    assert swept["recovered_count"] == 1
    assert swept["worker_ids"] == rehearsal["worker_ids"]
    task = state_of(everbeat, task_id)().document
    assert (task["state"], task["error"]["code"]) == ("FAILED", "WORKER_CRASHED")

    (recovery,) = everbeat("recoveries", "--json").assert_code(0).document["recoveries"]  # E11
    assert (recovery["task_id"], recovery["was"], recovery["noticed_by"]) == (task_id, "RUNNING", "sweep")
    assert recovery["worker_id"] == swept["worker_ids"][0]
    assert task_id in everbeat("recoveries", "--task", task_id).assert_code(0).out
    assert "Recoveries" in everbeat("tasks", "show", task_id).assert_code(0).out
    assert "No dead worker holds a task" in everbeat("sweep", "--threshold", "60s").assert_code(0).err


def long_ago(everbeat: Command) -> None:
    """Date every sign of life back by two minutes."""
    with psycopg.connect(everbeat.environment["EVERBEAT_DATABASE_URL"], autocommit=True) as connection:
        schema = sql.Identifier(everbeat.environment["EVERBEAT_SCHEMA"])
        for text in (
            "update {}.supervisors set last_beat_at = last_beat_at - interval '2 minutes'",
            "update {}.tasks set claimed_at = claimed_at - interval '2 minutes', started_at = started_at - interval '2 minutes'",
        ):
            connection.execute(sql.SQL(text).format(schema))


def test_workers_release_recovers_the_tasks_of_a_worker(
    everbeat: Command, shop_worker: RunningWorker
) -> None:
    task_id = everbeat("send", "shop", "slow", "seconds=60").assert_code(0).out.strip()
    until(state_of(everbeat, task_id), lambda answer: answer.document["state"] == "RUNNING")
    (worker,) = everbeat("workers", "--json").assert_code(0).document["workers"]
    name = worker["worker_id"]
    refusal = everbeat("workers", "release", f"{name[:-1]}x", "--json").assert_code(ExitCode.NOT_FOUND).error
    assert refusal["code"] == "UNKNOWN_NAME"
    assert f"did you mean {name!r}?" in refusal["fix"]
    answer = everbeat("workers", "release", name).assert_code(0)
    assert task_id in answer.out
    assert "Released 1 worker; recovered 1 task." in answer.err
    again = everbeat("workers", "release", name).assert_code(0)
    assert again.err == f"{name} had already ended and held nothing.\n"
    assert again.out == ""
    former = everbeat("workers", "release", f"{name[:-1]}x").assert_code(ExitCode.NOT_FOUND)
    assert f"did you mean {name!r}?" in former.err
    assert state_of(everbeat, task_id)().document["state"] == "FAILED"
    (recovery,) = everbeat("recoveries", "--json").assert_code(0).document["recoveries"]
    assert (recovery["noticed_by"], recovery["charge"]) == ("operator", "loss")
    assert shop_worker.process.poll() is None


def test_workers_quiet_stops_and_resumes_claiming(
    everbeat: Command, shop_worker: RunningWorker
) -> None:  # J1
    everbeat("send", "shop", "welcome", "user_id=1", "--wait").assert_code(0)
    (worker,) = everbeat("workers", "--json").assert_code(0).document["workers"]
    name, supervisor, host = worker["worker_id"], worker["supervisor_id"], worker["hostname"]
    for wrong in ((), (name, "--all"), ("--host", host, "--all")):
        assert "give ids, or --host, or --all" in everbeat("workers", "quiet", *wrong).assert_code(2).err
    refusal = (
        everbeat("workers", "quiet", supervisor, f"{name[:-1]}x", "--json")
        .assert_code(ExitCode.NOT_FOUND)
        .error
    )
    assert f"did you mean {name!r}?" in refusal["fix"]
    refusal = (
        everbeat("workers", "quiet", "--host", "elsewhere", "--json").assert_code(ExitCode.NOT_FOUND).error
    )
    assert refusal["message"].startswith("Host 'elsewhere' is not known here")
    assert "live" in everbeat("workers").out
    answer = everbeat("workers", "quiet", name).assert_code(0)
    assert f"Supervisor {supervisor}" in answer.err
    assert "1 worker) has been quiet since" in answer.err
    again = everbeat("workers", "quiet", "--host", host).assert_code(0)
    assert again.err == answer.err  # the first request stays in force
    assert "quiet" in everbeat("workers").out
    task_id = everbeat("send", "shop", "welcome", "user_id=2").assert_code(0).out.strip()
    assert (
        "WORKERS_QUIET  an operator made 1 live worker quiet"
        in everbeat("explain", task_id).assert_code(0).out
    )
    page = everbeat("doctor").out
    assert f"all of them made quiet by an operator: {supervisor}; tasks are open" in page
    assert "everbeat workers quiet --resume --all" in page
    answer = everbeat("workers", "quiet", "--all", "--resume").assert_code(0)
    assert answer.err.endswith("1 worker) claims again.\n")
    until(state_of(everbeat, task_id), lambda answer: answer.document["state"] == "COMPLETED")
    assert shop_worker.process.poll() is None


def test_commands_pause_and_resume_task_names_and_queues(
    everbeat: Command, shop_worker: RunningWorker
) -> None:
    everbeat("send", "shop", "welcome", "user_id=1", "--wait").assert_code(0)
    answer = everbeat("tasks", "pause", "welcome", "--reason", "the mail server rests").assert_code(0)
    assert "task welcome is paused since" in answer.out
    again = everbeat("tasks", "pause", "welcome", "--reason", "mine").assert_code(0)
    assert re.search(
        r"task welcome was paused already, since .*, by operator: the mail server rests", again.out
    )
    assert "The reason 'mine' is not stored" in again.err
    (document,) = everbeat("tasks", "pause", "welcome", "--json").assert_code(0).document["pauses"]
    assert (document["already_paused"], document["reason"]) == (True, "the mail server rests")
    assert (
        everbeat("queues", "pause", "default", "--json").assert_code(0).document["pauses"][0]["kind"]
        == "queue"
    )
    listed = everbeat("tasks", "pauses").assert_code(0).out
    assert "the mail server rests" in listed
    (queue, task) = everbeat("tasks", "pauses", "--json").assert_code(0).document["pauses"]
    assert (queue["name"], task["name"], task["paused_by"]) == ("default", "welcome", "operator")
    task_id = everbeat("send", "shop", "welcome", "user_id=2").assert_code(0).out.strip()
    refusal = everbeat("tasks", "pause", "welcom", "--json").assert_code(ExitCode.NOT_FOUND)
    assert "did you mean 'welcome'?" in refusal.document["pauses"][0]["error"]["fix"]
    assert everbeat("queues", "resume", "mail").assert_code(ExitCode.FAILED).err.count("is not paused") == 1
    assert state_of(everbeat, task_id)().document["state"] == "PENDING"
    everbeat("queues", "resume", "default").assert_code(0)
    assert state_of(everbeat, task_id)().document["state"] == "PENDING"
    assert "it was paused since" in everbeat("tasks", "resume", "welcome").assert_code(0).out
    until(state_of(everbeat, task_id), lambda answer: answer.document["state"] == "COMPLETED")
    assert "Nothing is paused." in everbeat("tasks", "pauses").assert_code(0).err
    assert shop_worker.process.poll() is None


@pytest.mark.parametrize(
    ("locator", "code", "said"),
    every_nth_quick(
        2,
        [
            ("nowhere:app", ExitCode.NOT_FOUND, "nowhere"),
            ("broken:app", ExitCode.FAILED, "boom"),
            ("unsound:app", ExitCode.USAGE, "check_interval_ms"),
            ("stray:app", ExitCode.DATABASE, "cannot be reached"),
        ],
    ),
)
def test_the_worker_command_reports_why_it_cannot_start(
    everbeat: Command, locator: str, code: int, said: str
) -> None:
    everbeat.write(
        "stray.py",
        "from everbeat import App\napp = App('postgresql://127.0.0.1:1/x')\n@app.task\ndef f() -> None: ...\n",
    )
    everbeat.write("broken.py", "raise ValueError('boom')\n")
    everbeat.write(
        "unsound.py",
        "from everbeat import App, RecoveryConfig\napp = App(recovery=RecoveryConfig(check_interval_ms=1))\n",
    )
    answer = everbeat("worker", locator).assert_code(code)
    assert "error: " in answer.err
    assert said in answer.err
    assert "worker_process.py" not in answer.err
    assert "worker_exited" not in answer.err


@pytest.mark.parametrize(
    "option",
    [("--processes", "0"), *(pytest.param(one, marks=pytest.mark.long) for one in MORE_INVALID_OPTIONS)],
)
def test_the_worker_command_refuses_invalid_settings(everbeat: Command, option: tuple[str, str]) -> None:
    answer = everbeat("worker", "shop:app", *option).assert_code(ExitCode.USAGE)
    assert option[0] in answer.err
    assert "typer" not in answer.err


@pytest.mark.parametrize(
    ("option", "said"),
    every_nth_quick(
        2,
        [
            (
                ("--max-rss", "5"),
                "must be a size of 16MB to 1024TB: a number and its unit, KB, MB, GB or TB.",
            ),
            (("--max-rss", "5MB"), "must be 16MB to 1024TB.\nfix: use 16MB or more, or omit it."),
            (("--max-tasks-per-process", "2000000000"), "fix: use 1000000000 or less, or omit it."),
            (("--grace", "soon"), 'fix: write "250ms", "30s", "5m", "1.5h", "2d" or "1h30m".'),
        ],
    ),
)
def test_the_fix_of_a_refused_worker_option_is_written_for_a_shell(
    everbeat: Command, option: tuple[str, str], said: str
) -> None:
    answer = everbeat("worker", "shop:app", *option).assert_code(ExitCode.USAGE)
    assert said in answer.err
    assert "None" not in answer.err
    assert "timedelta" not in answer.err


def test_the_send_command_puts_a_task_into_a_serial_line(
    everbeat: Command, shop_worker: RunningWorker
) -> None:
    everbeat("queues", "pause", "default", "--app", "shop:app").assert_code(0)
    first, second = (
        everbeat("send", "shop:app", "welcome", f"user_id={number}", "--serial", "customer-42").out.strip()
        for number in (1, 2)
    )
    reasons = everbeat("explain", second, "--json").assert_code(0).document["explanation"]["reasons"]
    (line,) = [reason for reason in reasons if reason["code"] == "SERIAL_LINE"]
    assert line["blocked_by"] == first
    assert "customer-42" in line["text"]
    everbeat("queues", "resume", "default").assert_code(0)
    until(state_of(everbeat, second), lambda answer: answer.document["state"] == "COMPLETED")
    assert shop_worker.process.poll() is None


def test_the_send_command_stores_a_task_that_no_worker_can_run_yet(everbeat: Command) -> None:  # B13
    everbeat("migrate").assert_code(0)
    url = everbeat.environment["EVERBEAT_DATABASE_URL"]
    sent = everbeat(
        "send", "--url", url, "unknown.task", "n=[1, 2]", "--queue", "films", "--key", "k", "--json"
    )
    task_id = sent.assert_code(0).document["id"]
    again = everbeat("send", "--url", url, "unknown.task", "--queue", "films", "--key", "k").assert_code(0)
    assert again.out.strip() == task_id
    assert "no live worker" in everbeat("tasks", "show", task_id).assert_code(0).out
    later = everbeat("send", "shop:app", "welcome", "user_id=1", "--delay", "1h").assert_code(0).out.strip()
    queues = everbeat("queues", "--json").assert_code(0).document["queues"]
    assert [(queue["name"], queue["pending"], queue["scheduled"]) for queue in queues] == [
        ("default", 0, 1),
        ("films", 1, 0),
    ]
    assert "films" in everbeat("queues").assert_code(0).out

    unclear = everbeat("send", "shop:app", "welcome", "user_id=1", "--wait-timeout", "20").assert_code(
        ExitCode.USAGE
    )
    assert "--wait-timeout" in unclear.err
    assert "Sent" not in unclear.err  # a send whose wait is refused sends no task
    waited = everbeat("send", "shop:app", "welcome", "user_id=1", "--wait-timeout", "200ms")
    assert "no live worker" in waited.assert_code(ExitCode.TIMEOUT).err

    page = everbeat("tasks", "list", "--limit", "2").assert_code(0)
    assert f"--before {later}" in page.err
    assert task_id in everbeat("tasks", "list", "--before", later).assert_code(0).out
    assert everbeat("tasks", "cancel", later).assert_code(0).out.split()[:2] == [later, "CANCELLED"]
    refused = (
        everbeat("tasks", "retry", task_id, later, "--json").assert_code(ExitCode.FAILED).document["tasks"]
    )
    assert refused[0]["error"]["code"] == "TASK_NOT_RETRYABLE"
    assert refused[1]["state"] == "PENDING"

    assert everbeat("tasks", "cancel", task_id).assert_code(0)
    live = everbeat("send", "--url", url, "unknown.task", "--queue", "films", "--key", "k").assert_code(0).out
    held = everbeat("tasks", "retry", task_id, later).assert_code(ExitCode.FAILED)
    assert live.strip() in held.err
    assert held.err.count("can be retried") == 1, "the next task of the line has run"


@pytest.mark.parametrize(
    "words",
    [
        "tasks show ID",
        "tasks cancel ID",
        "tasks retry ID",
        "tasks stream ID",
        "logs ID",
        "logs ID --follow",
        "tasks signal ID approved",
        "inbox answer ID yes",
        "dead redrive ID",
    ],
)
def test_commands_report_an_unknown_task(everbeat: Command, words: str) -> None:
    def run(given: str) -> Answer:
        return everbeat(*(given if word == "ID" else word for word in words.split()))

    everbeat("migrate").assert_code(0)
    unknown = str(uuid4())
    answer = run(unknown).assert_code(ExitCode.NOT_FOUND)
    assert f"Task {unknown} does not exist" in answer.err
    assert run("no-id").assert_code(ExitCode.USAGE).err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["shop:app", "welcom", "user_id=1"], ExitCode.NOT_FOUND, "use 'welcome'"),
        (["shop:app", "welcome", "user_id=many"], ExitCode.USAGE, "'user_id' = 'many' of task 'welcome'"),
        (
            ["shop:app", "welcome", "user_id=many"],
            ExitCode.USAGE,
            "fix: write user_id as JSON, such as user_id=42; it is declared as",
        ),
        (["shop:app", "welcome", "user_id=1.5"], ExitCode.USAGE, "'user_id' = 1.5 of task 'welcome'"),
        (["shop:app", "welcome", "user_id=1", "--serial", ""], ExitCode.USAGE, "--serial = ''"),
        (
            ["shop:app", "welcome", "user_id=1", "--timeout", "soon"],
            ExitCode.USAGE,
            '"1h30m", or omit it.',
        ),
        (["shop:app", "welcome"], ExitCode.USAGE, "user_id"),
        (["shop:app", "welcome", "usr_id=1"], ExitCode.USAGE, "did you mean 'user_id'?"),
        (["shop:app", "welcome", "--args", "[1]"], ExitCode.USAGE, "--args"),
        (["shop:app", "welcome", "user_id=1", "user_id=2"], ExitCode.USAGE, "twice"),
        (["shop:app", "welcome", "user_id=1", "--good-until", "2030-01-01"], ExitCode.USAGE, "time zone"),
        (["shop:app", "welcome", "user_id=1", "--delay", "soon"], ExitCode.USAGE, "--delay"),
        (["shop:app", "welcome", "extra"], ExitCode.USAGE, "'extra' is not an argument of 'welcome'"),
        (["one", "two", "three"], ExitCode.USAGE, "not understood"),
        (["shop:app", "welcome", "user_id=1", "--priority", "99999"], ExitCode.USAGE, "--priority = 99999"),
        (["shop:app"], ExitCode.USAGE, "the NAME of a task is missing"),
        (["shop.py", "user_id=1"], ExitCode.USAGE, "the NAME of a task is missing"),
        (["--app", "shop:app", "shop:app", "welcome"], ExitCode.USAGE, "twice"),
        (["shop:app", "welcome", "user_id=1", "--label", "a b=1"], ExitCode.USAGE, "--label = 'a b'"),
    ],
)
def test_the_send_command_refuses_invalid_names_and_arguments(
    everbeat: Command, words: list[str], code: int, said: str
) -> None:
    answer = everbeat("send", *words).assert_code(code)
    assert said in answer.err
    assert answer.out == ""


def test_output_of_an_imported_module_does_not_reach_stdout(everbeat: Command) -> None:
    sent = everbeat("send", "shop:app", "welcome", "user_id=1").assert_code(0)
    assert str(UUID(sent.out.strip())) == sent.out.strip()
    assert "importing shop" in sent.err


def test_the_send_command_reports_a_refusal_of_a_function_around_sends(everbeat: Command) -> None:
    everbeat.write(
        "strict.py",
        """
        from everbeat import App

        app = App()

        @app.around_send
        def refuse_large_orders(call):
            if call.arguments["items"] > 100:
                raise ValueError("too many items")

        @app.task
        def pack(items: int) -> None: ...
        """,
    )
    refused = everbeat("send", "strict:app", "pack", "items=101").assert_code(1)
    assert "Traceback" not in refused.err
    assert "refuse_large_orders" in refused.err
    assert "strict.py:6" in refused.err
    assert "ValueError: too many items" in refused.err
    assert (
        everbeat("send", "strict:app", "pack", "items=101", "--json").assert_code(1).error["code"]
        == "SEND_FAILED"
    )
    assert "Traceback" in everbeat("send", "strict:app", "pack", "items=101", EVERBEAT_DEBUG="1").err
    everbeat("send", "strict:app", "pack", "items=100").assert_code(0)
