"""The doctor's text about a session that blocks others."""

from __future__ import annotations

from datetime import UTC, datetime

from everbeat.domain.doctor.server import LockHolder, judge_locks


def holder(wait_event: str | None) -> LockHolder:
    return LockHolder(
        pid=4711, session="everbeat-0123456789abcdef worker 12.1", role="app", state="active", wait_event=wait_event,
        waiters=2, since=datetime(2026, 1, 1, tzinfo=UTC), waited_s=5.0, hostname="web-1",
    )  # fmt: skip


def test_the_doctor_suggests_ending_a_session_that_blocks_others() -> None:
    stuck = holder("ClientRead")
    assert "pg_terminate_backend(4711)" in stuck.command
    assert stuck.command in str(judge_locks([stuck]).fix)


def test_the_doctor_does_not_suggest_ending_a_session_that_waits_for_a_standby() -> None:
    waiting = holder("SyncRep")
    assert "pg_stat_replication" in waiting.command
    assert "waits for a synchronous standby" in waiting.text
    assert "terminate" not in waiting.command + str(judge_locks([waiting]).fix)


def test_the_doctor_names_a_blocking_session_whose_process_reads_no_answer() -> None:  # J14
    stuck = holder("ClientWrite")
    assert "process 12 on host web-1 (backend 4711, waits for its process to read an answer)" in stuck.text
    assert "pg_terminate_backend(4711)" in stuck.command
