"""`everbeat recoveries` and `everbeat explain` on recoveries that were made by hand: every filter, every question afterwards."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from everbeat import App
from everbeat.cli.exit_codes import ExitCode
from everbeat.store.leases import Claimed
from tests.cli.conftest import Command
from tests.client.conftest import app, hands
from tests.store.conftest import Hands

__all__ = ["app", "hands"]

CERTIFICATE = (
    b'{"code": "WORKER_CRASHED", "message": "died", "data": {"signal": 11, "exit_code": null, "out_of_memory": true,'
    b' "last_rss_bytes": 734003200, "last_progress": {"stage": "pack", "fraction": 0.5}, "crash_count": 1, "loss_count": 0, "pid": 77}}'
)


@pytest.fixture
def rescued(hands: Hands) -> tuple[Claimed, Claimed]:
    """Two tasks that were recovered: the first from w1, an hour ago, the second from w2, right now."""
    found = []
    for worker, cause in (("w1", "killed by SIGSEGV"), ("w2", "killed by SIGKILL")):
        claimed = hands.running(worker, policy=b'{"on_crash": "retry"}')
        (lease,) = hands.leases()
        hands.recover(lease, "retry", error=CERTIFICATE)
        hands.connection.execute(
            f"update {hands.target.schema}.recoveries set cause = %s where worker_id = %s",  # type: ignore[arg-type]
            [cause, worker],
        )
        app_cancels = hands.cancel(claimed.id)
        assert app_cancels == "CANCELLED"  # so that the next claim does not take it
        found.append(claimed)
    hands.connection.execute(
        f"update {hands.target.schema}.recoveries set noticed_at = noticed_at - interval '1 hour' where worker_id = 'w1'"  # type: ignore[arg-type]
    )
    return found[0], found[1]


def numbers(everbeat: Command, *options: str) -> list[int]:
    document = everbeat("recoveries", *options, "--json").assert_code(0).document
    return [each["id"] for each in document["recoveries"]]


def test_recoveries_are_filtered(everbeat: Command, rescued: tuple[Claimed, Claimed], app: App) -> None:
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
    assert (empty.out, empty.err) == ("", "No recovery is like that.\n")
    assert "no time zone" in everbeat("recoveries", "--since", "2030-01-31T12:00:00").assert_code(2).err
    assert "--since" in everbeat("recoveries", "--since", "soon").assert_code(2).err
    shown = everbeat("recoveries").assert_code(0).out
    assert "killed by SIGSEGV" in shown
    assert str(new) in shown.splitlines()[1].split()


def test_one_recovery_tells_everything_that_is_asked_afterwards(  # E11
    everbeat: Command, rescued: tuple[Claimed, Claimed], app: App, hands: Hands
) -> None:
    hands.connection.execute(
        f"update {hands.target.schema}.recoveries set charge = 'crash', suspect = true, hook = 'fail_with_backoff'"  # type: ignore[arg-type]
    )
    app.retry(rescued[0].id)
    (again,) = hands.claim("w2")
    hands.start(again)
    hands.settle(again, result=b"null")
    (recovery,) = app.recoveries(rescued[0].id)
    document = everbeat("recoveries", "show", str(recovery.id), "--json").assert_code(0).document["recovery"]
    assert (document["charge"], document["suspect"], document["hook"]) == ("crash", True, "fail_with_backoff")
    assert (document["ran_again_on"], document["became"]) == ("w2", "COMPLETED")
    assert document["ran_again_at"] is not None
    page = everbeat("recoveries", "show", str(recovery.id)).assert_code(0).out
    for said in (
        str(rescued[0].id), "w1 (pid 77 on host)", "killed by SIGSEGV", "signal", "11", "out of memory", "700 MiB", '{"stage":"pack"',
        "by age", "retry (to be run again)", "fail_with_backoff", "a crash:", "1 crashes, 0 losses", "runs next alone", "COMPLETED",
    ):  # fmt: skip
        assert said in page, said
    lines = dict(
        line.split(maxsplit=1) for line in page.splitlines() if line.startswith(("notice", "recovered "))
    )
    assert lines["noticed"].startswith("by age"), "the moment of the notice itself is not stored"
    assert lines["recovered"].startswith(
        recovery.noticed_at.astimezone().isoformat(sep=" ", timespec="milliseconds")
    )
    assert "RECOVERED" in everbeat("recoveries").assert_code(0).out.splitlines()[0].split()
    hands.connection.execute(f"delete from {hands.target.schema}.tasks")  # type: ignore[arg-type]
    assert "its record was pruned" in everbeat("recoveries", "show", str(recovery.id)).assert_code(0).out
    hands.connection.execute(f"delete from {hands.target.schema}.attempts")  # type: ignore[arg-type]


def test_an_unknown_recovery_is_no_page(everbeat: Command, app: App) -> None:
    missing = everbeat("recoveries", "show", "7").assert_code(ExitCode.NOT_FOUND)
    assert "Recovery 7 does not exist" in missing.err
    answer = everbeat("recoveries", "show", "7", "--json").assert_code(ExitCode.NOT_FOUND)
    assert answer.error["code"] == "RECOVERY_NOT_FOUND"
    assert "number" in everbeat("recoveries", "show", "0").assert_code(ExitCode.USAGE).err


def test_help_of_the_group_names_both(everbeat: Command) -> None:
    told = everbeat("recoveries", "--help").assert_code(0).out
    assert "list" in told
    assert "show" in told
    assert "--cause" in everbeat("recoveries", "list", "--help").assert_code(0).out


def test_a_task_is_explained(everbeat: Command, app: App, hands: Hands) -> None:
    task = hands.send(queue="mail")
    hands.connection.execute(
        f"insert into {hands.target.schema}.pauses (kind, name, paused_by, reason) values ('queue', 'mail', 'ann', 'moving')"  # type: ignore[arg-type]
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
    assert list(found) == ["task_id", "name", "queue", "state", "at", "reasons", "second_runs"]
    (reason,) = found["reasons"]
    assert list(reason) == ["code", "text", "since", "until", "blocked_by", "command"]
    assert (reason["code"], reason["blocked_by"], reason["until"]) == ("QUEUE_PAUSED", "mail", None)
    assert "queue 'mail' was paused" in everbeat("tasks", "show", str(task)).assert_code(0).out


def test_a_second_run_is_explained(everbeat: Command, rescued: tuple[Claimed, Claimed], app: App) -> None:
    page = everbeat("explain", str(rescued[1].id)).assert_code(0).out
    assert "CANCELLED" in page
    app.retry(rescued[1].id)
    page = everbeat("explain", str(rescued[1].id)).assert_code(0).out
    assert "Taken up again, because" in page
    assert "worker w2, which ran attempt 1, died: killed by SIGKILL" in page


def test_an_unknown_task_is_not_explained(everbeat: Command, app: App) -> None:
    assert "does not exist" in everbeat("explain", str(uuid4())).assert_code(ExitCode.NOT_FOUND).err
    assert "must be a UUID" in everbeat("explain", "first").assert_code(ExitCode.USAGE).err
