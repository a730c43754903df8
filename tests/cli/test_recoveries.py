"""Test `everbeat recoveries` and `everbeat explain` on recoveries made by hand: filters and details."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.store.claims import Claimed
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.store.conftest import StoreHarness

__all__ = ["app", "db"]

CERTIFICATE = (
    b'{"code": "WORKER_CRASHED", "message": "died", "data": {"signal": 11, "exit_code": null, "out_of_memory": true,'
    b' "last_rss_bytes": 734003200, "last_progress": {"stage": "pack", "fraction": 0.5}, "crash_count": 1, "loss_count": 0, "pid": 77}}'
)


@pytest.fixture
def rescued(db: StoreHarness) -> tuple[Claimed, Claimed]:
    """Return two recovered tasks: the first from w1 an hour ago, the second from w2 now."""
    found = []
    for worker, cause in (("w1", "killed by SIGSEGV"), ("w2", "killed by SIGKILL")):
        claimed = db.running(worker, policy=b'{"on_crash": "retry"}')
        (lease,) = db.leases()
        db.recover(lease, "retry", error=CERTIFICATE)
        db.connection.execute(
            f"update {db.target.schema}.recoveries set cause = %s where worker_id = %s",  # type: ignore[arg-type]
            [cause, worker],
        )
        app_cancels = db.cancel(claimed.id)
        assert app_cancels == "CANCELLED"  # so that the next claim does not take it
        found.append(claimed)
    db.connection.execute(
        f"update {db.target.schema}.recoveries set noticed_at = noticed_at - interval '1 hour' where worker_id = 'w1'"  # type: ignore[arg-type]
    )
    return found[0], found[1]


def numbers(everbeat: Command, *options: str) -> list[int]:
    document = everbeat("recoveries", *options, "--json").assert_code(0).document
    return [each["id"] for each in document["recoveries"]]


def test_the_recoveries_command_filters_recoveries(
    everbeat: Command, rescued: tuple[Claimed, Claimed], app: App
) -> None:
    new, old = (each.id for each in app.recoveries())
    assert numbers(everbeat) == numbers(everbeat, "list") == [new, old]
    assert numbers(everbeat, "--task", str(rescued[0].id)) == [old]
    assert numbers(everbeat, "list", "--worker", "w2") == [new]
    assert numbers(everbeat, "--cause", "sigsegv") == [old]
    assert numbers(everbeat, "--cause", "age", "--limit", "1") == [new]
    assert numbers(everbeat, "--since", "30m") == [new]
    an_hour_and_more = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    assert numbers(everbeat, "--since", an_hour_and_more) == [new, old]
    empty = everbeat("recoveries", "--worker", "w7").assert_code(0)
    assert (empty.out, empty.err) == ("", "No matching recoveries.\n")
    assert "no time zone" in everbeat("recoveries", "--since", "2030-01-31T12:00:00").assert_code(2).err
    for wrong in ("yesterday", "soon", "-2h"):
        refusal = everbeat("recoveries", "--since", wrong).assert_code(2).err
        assert refusal.startswith(f"error: --since is {wrong!r}") or f"{wrong!r}" in refusal
        for form in ("--since", '"2h"', "2030-01-31T12:00:00Z"):
            assert form in refusal, refusal
        assert "timedelta" not in refusal
    assert "--cause" in everbeat("recoveries", "--cause", "").assert_code(2).err
    shown = everbeat("recoveries").assert_code(0).out
    assert "killed by SIGSEGV" in shown
    assert str(new) in shown.splitlines()[1].split()


def test_recoveries_show_has_every_detail_of_a_recovery(  # E11
    everbeat: Command, rescued: tuple[Claimed, Claimed], app: App, db: StoreHarness
) -> None:
    db.connection.execute(
        f"update {db.target.schema}.recoveries set charge = 'crash', suspect = true, hook = 'fail_with_backoff'"  # type: ignore[arg-type]
    )
    app.retry(rescued[0].id)
    (again,) = db.claim("w2")
    db.start(again)
    db.settle(again, result=b"null")
    (recovery,) = app.recoveries(rescued[0].id)
    document = everbeat("recoveries", "show", str(recovery.id), "--json").assert_code(0).document["recovery"]
    assert (document["charge"], document["suspect"], document["hook"]) == ("crash", True, "fail_with_backoff")
    assert (document["ran_again_on"], document["became"]) == ("w2", "COMPLETED")
    assert document["ran_again_at"] is not None
    page = everbeat("recoveries", "show", str(recovery.id)).assert_code(0).out
    for said in (
        str(rescued[0].id), "w1 (pid 77 on host)", "killed by SIGSEGV", "signal", "11", "out of memory", "700 MiB", '{"stage":"pack"',
        "by age", "retry (will run again)", "fail_with_backoff", "a crash:", "1 crash, 0 losses", "its next attempt runs alone", "COMPLETED",
    ):  # fmt: skip
        assert said in page, said
    lines = dict(
        line.split(maxsplit=1) for line in page.splitlines() if line.startswith(("notice", "recovered "))
    )
    assert lines["noticed"].startswith("by age"), "the time of the detection itself is not stored"
    assert lines["recovered"].startswith(
        recovery.noticed_at.astimezone().isoformat(sep=" ", timespec="milliseconds")
    )
    assert "RECOVERED" in everbeat("recoveries").assert_code(0).out.splitlines()[0].split()
    db.connection.execute(f"delete from {db.target.schema}.tasks")  # type: ignore[arg-type]
    assert "its record was pruned" in everbeat("recoveries", "show", str(recovery.id)).assert_code(0).out
    db.connection.execute(f"delete from {db.target.schema}.attempts")  # type: ignore[arg-type]


def test_recoveries_show_of_an_unknown_recovery_is_not_found(everbeat: Command, app: App) -> None:
    missing = everbeat("recoveries", "show", "7").assert_code(ExitCode.NOT_FOUND)
    assert "Recovery 7 does not exist" in missing.err
    answer = everbeat("recoveries", "show", "7", "--json").assert_code(ExitCode.NOT_FOUND)
    assert answer.error["code"] == "RECOVERY_NOT_FOUND"
    assert "number" in everbeat("recoveries", "show", "0").assert_code(ExitCode.USAGE).err


def test_the_help_of_recoveries_names_list_and_show(everbeat: Command) -> None:
    told = everbeat("recoveries", "--help").assert_code(0).out
    assert "list" in told
    assert "show" in told
    assert "--cause" in everbeat("recoveries", "list", "--help").assert_code(0).out


def test_explain_prints_the_reasons_of_a_waiting_task(everbeat: Command, app: App, db: StoreHarness) -> None:
    task = db.send(queue="mail")
    db.connection.execute(
        f"insert into {db.target.schema}.pauses (kind, name, paused_by, reason) values ('queue', 'mail', 'ann', 'moving')"  # type: ignore[arg-type]
    )
    page = everbeat("explain", str(task)).assert_code(0).out
    for said in (
        str(task),
        "QUEUE_PAUSED",
        "queue 'mail' was paused by ann: moving",
        "since ",
        "everbeat queues resume mail",
    ):
        assert said in page, said
    found = everbeat("explain", str(task), "--json").assert_code(0).document["explanation"]
    assert list(found) == [
        "task_id", "name", "queue", "state", "at", "reasons", "second_runs", "workflow_id", "workflow", "node",
        "labels",
    ]  # fmt: skip
    assert (found["workflow_id"], found["workflow"], found["node"]) == (None, None, None)
    (reason,) = found["reasons"]
    assert list(reason) == ["code", "text", "since", "until", "blocked_by", "command", "node"]
    assert (reason["code"], reason["blocked_by"], reason["until"]) == ("QUEUE_PAUSED", "mail", None)
    assert "queue 'mail' was paused" in everbeat("tasks", "show", str(task)).assert_code(0).out


def test_explain_prints_why_a_task_ran_again(
    everbeat: Command, rescued: tuple[Claimed, Claimed], app: App
) -> None:
    page = everbeat("explain", str(rescued[1].id)).assert_code(0).out
    assert "CANCELLED" in page
    app.retry(rescued[1].id)
    page = everbeat("explain", str(rescued[1].id)).assert_code(0).out
    assert "Taken up again" not in page, "it waits for its next attempt"
    assert "Earlier attempts" in page
    assert "worker w2, which ran attempt 1, died: killed by SIGKILL" in page


def test_explain_of_an_unknown_task_is_not_found(everbeat: Command, app: App) -> None:
    assert "does not exist" in everbeat("explain", str(uuid4())).assert_code(ExitCode.NOT_FOUND).err
    assert "must be an id" in everbeat("explain", "first").assert_code(ExitCode.USAGE).err


@pytest.mark.parametrize(
    ("noticed_by", "expected"),
    [
        ("child_exit", "by child exit, 4 ms after it ended"),
        ("age", "by age, 4 ms after its last sign of life"),
        ("progress", "by progress, 4 ms after the last sign of life of its code"),
    ],
)
def test_recoveries_show_names_the_start_of_the_detection_time(
    everbeat: Command,
    app: App,
    rescued: tuple[Claimed, Claimed],
    db: StoreHarness,
    noticed_by: str,
    expected: str,
) -> None:
    db.connection.execute(
        f"update {db.target.schema}.recoveries set noticed_by = %s, noticed_after_ms = 4",  # type: ignore[arg-type]
        [noticed_by],
    )
    (recovery,) = app.recoveries(rescued[0].id)
    page = everbeat("recoveries", "show", str(recovery.id)).assert_code(0).out
    (line,) = (line for line in page.splitlines() if line.startswith("noticed "))
    assert line.split(maxsplit=1)[1] == expected


def test_a_pipe_gets_no_trailing_blanks(
    everbeat: Command, app: App, rescued: tuple[Claimed, Claimed], db: StoreHarness
) -> None:
    long = b'{"code": "X", "message": "' + b"m" * 400 + b'"}'
    db.connection.execute(f"update {db.target.schema}.tasks set error = %s", [long.decode()])  # type: ignore[arg-type]
    for command in (["tasks", "show", str(rescued[0].id)], ["tasks", "list"], ["recoveries"]):
        lines = everbeat(*command).assert_code(0).out.splitlines()
        assert max(map(len, lines)) > 100, "a cell must need padding"
        assert [line for line in lines if line != line.rstrip()] == []


def test_a_sweep_reports_its_counts_with_correct_nouns(everbeat: Command, app: App, db: StoreHarness) -> None:
    claimed = db.running()
    db.connection.execute(
        f"update {db.target.schema}.workers set ended_at = now(), ended_how = 'left' where id = 'w1'"
    )  # type: ignore[arg-type]
    said = everbeat("sweep", "--dry-run", "--threshold", "2m").assert_code(0).err
    assert said == "Dry run: 1 task of 1 worker would be recovered.\n"
    said = everbeat("sweep", "--threshold", "2m").assert_code(0).err
    assert said.endswith("Recovered 1 task of 1 dead worker; another process had already settled 0.\n")
    assert db.row(claimed.id, "state") == "FAILED"
    said = everbeat("sweep", "--dry-run", "--threshold", "2m").assert_code(0).err
    assert said.endswith("Dry run: 0 tasks of 0 workers would be recovered.\n")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["sweep", "--dry-run", "--threshold", "1s"], "--threshold"),
        (["sweep", "--dry-run", "--threshold", "soon"], "--threshold"),
        (["sweep", "--dry-run", "--recovery-delay", "soon"], "--recovery-delay"),
        (["sweep", "--dry-run", "--recovery-delay", "2d"], "--recovery-delay"),
        (["sweep", "--dry-run", "--resilient-flag", "a b"], "--resilient-flag"),
        (["workers", "--stale-after", "soon"], "--stale-after"),
        (["prune", "--terminal-records", "-1"], "--terminal-records"),
        (["prune", "--worker-states", "0"], "--worker-states"),
        (["prune", "--heartbeats", "0"], "--heartbeats"),
    ],
)
def test_a_refused_option_is_named_as_typed(
    everbeat: Command, app: App, command: list[str], option: str
) -> None:
    refusal = everbeat(*command).assert_code(ExitCode.USAGE).err
    assert refusal.startswith(f"error: {option}"), refusal
    assert "Config" not in refusal
    assert "None" not in refusal


def test_the_history_of_an_unknown_worker_is_not_found(everbeat: Command, app: App, db: StoreHarness) -> None:
    known = everbeat("workers", "--history", "w1").assert_code(0)
    assert known.err == "Worker 'w1' has no snapshots.\n"
    for more in ([], ["--json"]):
        unknown = everbeat("workers", "--history", "w11", *more).assert_code(ExitCode.NOT_FOUND)
        assert "did you mean 'w1'?" in unknown.err


@pytest.mark.parametrize("reason", ["", "  ", "x" * 1_001, "two\nlines", "\x1b[31mred"])
def test_the_reason_of_a_pause_must_be_readable_text(
    everbeat: Command, app: App, db: StoreHarness, reason: str
) -> None:
    db.send(queue="mail")
    refusal = everbeat("tasks", "pause", "work", "--reason", reason).assert_code(ExitCode.USAGE).err
    assert refusal.startswith("error: --reason"), refusal
    assert everbeat("queues", "pause", "mail", "--reason", reason).code == ExitCode.USAGE
    assert app.list_pauses() == []
