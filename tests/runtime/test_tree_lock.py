from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat.runtime.channel import BlockingChannel
from everbeat.runtime.identity import TreeLock, TreeVerdict, own_folder, remove_if_gone, verdict_on
from everbeat.runtime.processes import ChildProcess
from tests.runtime.programs.messages import Message, Say
from tests.runtime.programs.start import start_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[TreeLock]:
    taken = TreeLock.take(tmp_path)
    yield taken
    taken.release(remove=True)


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    """Yield a child with its own child: both hold the locks that their parent held when it started them."""
    started = start_child("parent")
    yield started
    end(started)


def end(child: ChildProcess) -> None:
    if child.kill():  # false if it had ended by itself
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child.poll()
    child.close()


def words_of(child: ChildProcess) -> str:
    message = BlockingChannel(child.channel_socket, messages=Message).receive(timeout_s=20)
    assert isinstance(message, Say)
    return message.text


def verdict(lock: TreeLock) -> TreeVerdict:
    return verdict_on(str(lock.path), name=lock.name)


def holds(pid: int, lock: TreeLock) -> bool:
    files = Path(f"/proc/{pid}/fd")

    def target(each: Path) -> Path | None:
        try:
            return each.readlink()
        except FileNotFoundError:  # closed meanwhile
            return None

    return any(target(each) == lock.path for each in files.iterdir())


def test_a_tree_lock_is_held_until_its_owner_releases_it(tmp_path: Path) -> None:
    lock = TreeLock.take(tmp_path)
    assert verdict(lock) is TreeVerdict.HELD
    assert lock.path.read_text() == lock.name
    assert not remove_if_gone(str(lock.path), name=lock.name)
    lock.release(remove=False)
    assert verdict(lock) is TreeVerdict.GONE
    assert remove_if_gone(str(lock.path), name=lock.name)
    assert verdict(lock) is TreeVerdict.UNKNOWN


def test_a_tree_lock_is_free_when_the_last_process_of_the_tree_ended(tmp_path: Path) -> None:  # E10
    lock = TreeLock.take(tmp_path)
    child = start_child("sleep")
    words_of(child)
    lock.release(remove=False)
    assert verdict(lock) is TreeVerdict.HELD, "the owner has ended and a child still runs"
    os.kill(child.pid, signal.SIGSTOP)
    assert verdict(lock) is TreeVerdict.HELD, "a stopped process can continue at any time"
    end(child)
    assert verdict(lock) is TreeVerdict.GONE


def test_every_generation_of_a_tree_holds_the_tree_lock(lock: TreeLock, child: ChildProcess) -> None:
    grandchild = int(words_of(child))
    assert holds(child.pid, lock)
    assert holds(grandchild, lock)


def test_processes_started_or_forked_by_user_code_do_not_hold_the_tree_lock(lock: TreeLock) -> None:
    parent = start_child("stranger")
    stranger = int(words_of(parent))
    assert holds(parent.pid, lock)
    assert not holds(stranger, lock)
    os.kill(stranger, signal.SIGKILL)
    end(parent)
    parent = start_child("fork-and-die")
    line = BlockingChannel(parent.channel_socket, messages=Message)
    assert line.receive(timeout_s=20) == Say("ready")
    forked = line.receive(timeout_s=20)
    assert isinstance(forked, Say)
    give_up_at = time.monotonic() + 10
    while holds(int(forked.text), lock):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)  # the copy closes it soon after its start, without an event
    os.kill(int(forked.text), signal.SIGKILL)
    end(parent)
    lock.release(remove=False)
    assert verdict(lock) is TreeVerdict.GONE


def test_a_forked_process_cannot_release_the_tree_lock(lock: TreeLock) -> None:
    pid = os.fork()
    if pid == 0:
        lock.release(remove=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert verdict(lock) is TreeVerdict.HELD


def test_only_the_recorded_tree_lock_file_is_proof_of_death(lock: TreeLock, tmp_path: Path) -> None:
    lock.release(remove=False)
    name, path = lock.name, str(lock.path)
    other = "everbeat-" + "0" * 16
    link = tmp_path / f"{other}.lock"
    link.symlink_to(lock.path)
    os.mkfifo(tmp_path / "everbeat-ffffffffffffffff.lock")
    assert verdict_on(path, name=other) is TreeVerdict.UNKNOWN, "another tree was recorded"
    assert verdict_on(str(link), name=other) is TreeVerdict.UNKNOWN, "a link must not count"
    assert verdict_on(os.path.relpath(path), name=name) is TreeVerdict.UNKNOWN, (
        "a relative path must not count"
    )
    assert verdict_on("/dev/null", name=name) is TreeVerdict.UNKNOWN
    pipe = tmp_path / "everbeat-ffffffffffffffff.lock"
    assert verdict_on(str(pipe), name=pipe.stem) is TreeVerdict.UNKNOWN, "opening a pipe must not block"
    lock.path.write_text("somebody else")
    assert verdict_on(path, name=name) is TreeVerdict.UNKNOWN, "the content is not as recorded"


def test_the_folder_of_tree_locks_is_private_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = own_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="only this user"):
        own_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert own_folder() == tmp_path / f"everbeat-{os.geteuid()}"


def test_a_started_program_gets_no_tree_lock_variable(lock: TreeLock) -> None:
    code = "import os; print(sorted(name for name in os.environ if name.startswith('EVERBEAT_')))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "EVERBEAT_TREE_LOCK" not in seen
    assert verdict(lock) is TreeVerdict.HELD
