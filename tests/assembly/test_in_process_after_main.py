"""Test that a worker in a thread continues after the main thread has ended, when Python shuts down its thread pools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
from psycopg import sql

PROGRAM = """
import sys, threading
import psycopg
from everbeat import App

app = App(sys.argv[1], schema=sys.argv[2])

@app.task
def double(n: int) -> int:
    return 2 * n

def send_when_main_has_ended():
    threading.main_thread().join()
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and application_name ~ '^everbeat-[0-9a-f]{16} '"
        )
    print("answer", double.send(21).result(timeout=20), flush=True)
    app.stop_worker()

worker = threading.Thread(target=app.run_worker)
worker.start()
assert double.send(1).result(timeout=20) == 2
threading.Thread(target=send_when_main_has_ended).start()
"""


def test_an_in_process_worker_in_a_thread_outlives_the_main_thread(
    database_url: str, schema: str, tmp_path: Path
) -> None:  # D7
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), database_url, schema],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "answer 42" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            sql.SQL("select ended_how from {}.supervisors").format(sql.Identifier(schema))
        ).fetchall()
    assert rows == [("left",)]
