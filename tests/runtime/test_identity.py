from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from msgspec.structs import replace

from everbeat.runtime import identity
from everbeat.runtime.identity import ProcessIdentity, cpu_seconds, new_id, rss_bytes, start_ticks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="proofs of death are read from /proc")


def sleeper() -> subprocess.Popen[bytes]:
    code = "import time; print(flush=True); time.sleep(600)"  # until it is killed
    return subprocess.Popen([sys.executable, "-c", code], stdout=-1)


def identity_of(pid: int) -> ProcessIdentity:
    return replace(ProcessIdentity.current(), pid=pid, start_ticks=start_ticks(pid))


def test_the_current_process_is_identified_and_not_gone() -> None:
    me = ProcessIdentity.current()
    assert (me.pid, me.hostname) == (os.getpid(), socket.gethostname())
    assert me.boot_id is not None
    assert me.pid_namespace is not None
    assert me.start_ticks is not None
    assert me == ProcessIdentity.current()
    assert not me.is_provably_gone()


def test_a_killed_process_is_provably_gone_before_and_after_it_is_reaped() -> None:  # E10
    child = sleeper()
    assert child.stdout is not None
    child.stdout.readline()
    known = identity_of(child.pid)
    assert not known.is_provably_gone()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert known.is_provably_gone()
    child.communicate()
    assert known.is_provably_gone()


def test_a_later_process_with_the_same_pid_is_not_mistaken_for_the_earlier() -> None:  # E10
    me = ProcessIdentity.current()
    assert me.start_ticks is not None
    assert replace(me, start_ticks=me.start_ticks - 1).is_provably_gone()


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"boot_id": None}, {"pid_namespace": 1}, {"pid_namespace": None}]
)
def test_a_process_of_another_boot_or_namespace_is_never_provably_gone(
    change: dict[str, object],
) -> None:  # E10
    nobody = replace(identity_of(2**22), start_ticks=1)
    assert nobody.is_provably_gone()
    assert not replace(nobody, **change).is_provably_gone()  # type: ignore[arg-type]


def test_another_host_name_is_not_proof_of_death() -> None:  # E10
    me = ProcessIdentity.current()
    assert not replace(me, hostname="web-2").is_provably_gone()


def test_process_ids_are_unique_readable_and_short_for_any_host_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert re.fullmatch(rf".+-{os.getpid()}-[0-9a-f]{{8}}", new_id())
    assert len({new_id() for _ in range(1000)}) == 1000
    monkeypatch.setattr(identity.socket, "gethostname", lambda: "größter rechner " + "x" * 60)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,49}", new_id())


def test_memory_and_processor_time_are_read_of_this_and_another_process() -> None:
    child = sleeper()
    assert child.stdout is not None
    child.stdout.readline()
    for pid in (None, os.getpid(), child.pid):
        memory, cpu = rss_bytes(pid), cpu_seconds(pid)
        assert memory is not None
        assert 2**20 < memory < 2**32
        assert cpu is not None
        assert 0 <= cpu < 3600
    child.kill()
    child.communicate()
    assert rss_bytes(child.pid) is None
    assert cpu_seconds(child.pid) is None


def test_a_program_name_with_brackets_and_spaces_is_parsed_correctly() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 (x', 0, 0, 0)"
    code = f"{rename}; import time; print(flush=True); time.sleep(600)"  # until it is killed
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    ticks = start_ticks(child.pid)
    mine = start_ticks(os.getpid())
    child.kill()
    child.communicate()
    assert ticks is not None
    assert mine is not None
    assert ticks >= mine
