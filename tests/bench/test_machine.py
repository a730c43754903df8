"""Two readings of a machine show which processes used it, and which of them belong to the bench."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everbeat.bench.machine import ENDED, STOLEN, OtherUsage, Process, Reading, between
from tests.variants import long_except

US, SERVER, CHILD, SHELL, INNER, BUILD, KERNEL = 100, 200, 101, 300, 301, 302, 2


def process(
    parent: int,
    used_s: float,
    reaped_s: float = 0.0,
    *,
    name: str = "it",
    start: int = 7,
    kernel: bool = False,
) -> Process:
    return Process(
        name=name, parent=parent, is_kernel=kernel, used_s=used_s, reaped_s=reaped_s, start_ticks=start
    )


def reading(at_s: float, busy_s: float, processes: dict[int, Process], *, stolen_s: float = 0.0) -> Reading:
    return Reading(at_s=at_s, busy_s=busy_s, stolen_s=stolen_s, processes=processes)


def found(
    before: dict[int, Process], after: dict[int, Process], busy_s: float, stolen_s: float = 0
) -> OtherUsage:
    """The usage found in two seconds with this much busy time."""
    first, last = reading(10, 50, before), reading(12, 50 + busy_s, after, stolen_s=stolen_s)
    return between(first, last, {US, SERVER})


def users(others: OtherUsage) -> dict[str, float]:
    return {user.name: user.cores for user in others.busiest}


def test_the_time_of_an_ended_child_of_the_bench_stays_own_time() -> None:
    before = {US: process(1, 1.0), CHILD: process(US, 4.0), SERVER: process(1, 2.0, 30.0)}
    after = {US: process(1, 1.2, 5.0), SERVER: process(1, 2.0, 30.4)}  # a session came and went
    seen = found(before, after, busy_s=1.8)
    assert (seen.own_cores, seen.cores, seen.over_s) == (0.8, 0.1, 2.0)
    assert users(seen) == {ENDED: 0.1}


def test_the_time_of_kernel_threads_does_not_count() -> None:
    before, after = {KERNEL: process(0, 5.0, kernel=True)}, {KERNEL: process(0, 5.5, kernel=True)}
    assert found(before, after, busy_s=0.5).cores == 0.0


def test_stolen_time_counts_as_the_time_of_others() -> None:
    seen = found({}, {}, busy_s=1.0, stolen_s=1.0)
    assert (seen.cores, users(seen)) == (0.5, {STOLEN: 0.5})


def test_other_processes_are_charged_for_reaped_children_only_in_the_measured_time() -> None:
    """A build step of ten minutes ends, and its shell with it: all but its last second was before."""
    before = {
        SHELL: process(1, 1.0, name="make"),
        INNER: process(SHELL, 1.0, 2.0, name="sh"),
        BUILD: process(INNER, 600.0, name="cc"),
    }
    after = {SHELL: process(1, 1.0, 1.0 + 2.0 + 601.0, name="make")}
    assert users(found(before, after, busy_s=1.0)) == {"make": 0.5}


def test_a_reused_pid_counts_as_another_process() -> None:
    before, after = {BUILD: process(1, 600.0, name="cc")}, {BUILD: process(1, 0.5, name="ld", start=8)}
    assert users(found(before, after, busy_s=0.5)) == {"ld": 0.25}


def test_the_measured_time_of_other_processes_is_never_negative() -> None:
    assert found({US: process(1, 1.0)}, {US: process(1, 2.0)}, busy_s=0.9).cores == 0.0


OWN = """
import subprocess, sys, time
from contextlib import closing
import psycopg
from everbeat.bench.machine import Meter

url, how = sys.argv[1:]
burn = "import time\\nwhile time.process_time() < 1: pass"
child = [sys.executable, "-c", burn]
orphan = [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"]

def work():
    if how == "child":
        subprocess.run(child)
    elif how == "orphan":  # its parent ends first, and does not reap it
        with subprocess.Popen(orphan, stdout=subprocess.PIPE) as parent:
            parent.communicate()  # until the orphan has closed its end, too
    else:
        with closing(psycopg.connect(url)) as session:
            until = "clock_timestamp() < statement_timestamp() + interval '2 s'"
            session.execute(f"do $$ begin while {until} loop end loop; end $$")
        # The time of a session counts in any case: as its own, or as its server's when it has ended.

with psycopg.connect(url, autocommit=True) as connection:
    found = Meter(connection, "everbeat").during(work)
print(found.own_cores * found.over_s, [user.name for user in found.busiest])
"""


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what other processes use")


@linux_only
@pytest.mark.story
@pytest.mark.parametrize("how", long_except(["child", "orphan", "session"], "orphan"))
def test_ended_processes_of_the_bench_do_not_count_as_others(database_url: str, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN, database_url, how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    used_s = float(done.stdout.split()[0])
    print(done.stdout)
    # A session burns for two seconds of the clock, of which a busy machine gives it only a part.
    assert used_s > (0.15 if how == "session" else 0.95)


GROWING = """
import os, subprocess, sys, threading, time
from everbeat.bench.machine import read_machine

burn = "import time\\nwhile time.process_time() < 0.08: pass"
ended = threading.Event()

def spawn():
    while not ended.is_set():
        subprocess.run([sys.executable, "-I", "-S", "-c", burn])

threads = [threading.Thread(target=spawn) for _ in range(3)]
for thread in threads:
    thread.start()
totals, ends_at = [], time.monotonic() + 3
while time.monotonic() < ends_at:
    seen = read_machine()
    own = [seen.processes[pid] for pid in seen.with_descendants({os.getpid()})]
    totals.append(sum(process.used_s + process.reaped_s for process in own))
ended.set()
for thread in threads:
    thread.join()
print(min(after - before for before, after in zip(totals, totals[1:])))
"""


@linux_only
@pytest.mark.story
def test_the_time_of_a_process_that_ends_during_a_reading_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > -0.015  # a tick, by which the kernel rounds
