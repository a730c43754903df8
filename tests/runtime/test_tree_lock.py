from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat.runtime.blocking_channel import BlockingChannel
from everbeat.runtime.process import ChildProcess
from everbeat.runtime.tree_lock import TreeLock, TreeVerdict, own_folder, remove_if_gone, verdict_on
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
    """Two generations: the child holds whatever its parent held when it was started, and so does its own child."""
    started = start_child("parent")
    yield started
    end(started)


def end(child: ChildProcess) -> None:
    if child.kill():  # otherwise it had ended by itself
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


def test_it_is_held_until_its_maker_lets_go(tmp_path: Path) -> None:
    lock = TreeLock.take(tmp_path)
    assert verdict(lock) is TreeVerdict.HELD
    assert lock.path.read_text() == lock.name
    assert not remove_if_gone(str(lock.path), name=lock.name)
    lock.release(remove=False)
    assert verdict(lock) is TreeVerdict.GONE
    assert remove_if_gone(str(lock.path), name=lock.name)
    assert verdict(lock) is TreeVerdict.UNKNOWN


def test_the_last_process_of_the_tree_frees_it(tmp_path: Path) -> None:  # E10
    lock = TreeLock.take(tmp_path)
    child = start_child("sleep")
    words_of(child)
    lock.release(remove=False)
    assert verdict(lock) is TreeVerdict.HELD, "its maker is gone, a child is left"
    os.kill(child.pid, signal.SIGSTOP)
    assert verdict(lock) is TreeVerdict.HELD, "a stopped process may go on at any time"
    end(child)
    assert verdict(lock) is TreeVerdict.GONE


def test_every_generation_of_the_tree_holds_it(lock: TreeLock, child: ChildProcess) -> None:
    grandchild = int(words_of(child))
    assert holds(child.pid, lock)
    assert holds(grandchild, lock)


def test_what_user_code_starts_or_forks_is_not_of_the_tree(lock: TreeLock) -> None:
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
        time.sleep(0.01)  # the copy closes it in its first moments, and tells nobody
    os.kill(int(forked.text), signal.SIGKILL)
    end(parent)
    lock.release(remove=False)
    assert verdict(lock) is TreeVerdict.GONE


def test_a_forked_copy_cannot_let_go_of_it(lock: TreeLock) -> None:
    pid = os.fork()
    if pid == 0:
        lock.release(remove=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert verdict(lock) is TreeVerdict.HELD


def test_only_the_recorded_file_proves_anything(lock: TreeLock, tmp_path: Path) -> None:
    lock.release(remove=False)
    name, path = lock.name, str(lock.path)
    other = "everbeat-" + "0" * 16
    link = tmp_path / f"{other}.lock"
    link.symlink_to(lock.path)
    os.mkfifo(tmp_path / "everbeat-ffffffffffffffff.lock")
    assert verdict_on(path, name=other) is TreeVerdict.UNKNOWN, "another tree was recorded"
    assert verdict_on(str(link), name=other) is TreeVerdict.UNKNOWN, "no links"
    assert verdict_on(os.path.relpath(path), name=name) is TreeVerdict.UNKNOWN, "no relative path"
    assert verdict_on("/dev/null", name=name) is TreeVerdict.UNKNOWN
    pipe = tmp_path / "everbeat-ffffffffffffffff.lock"
    assert verdict_on(str(pipe), name=pipe.stem) is TreeVerdict.UNKNOWN, "nobody writes to it, nobody waits"
    lock.path.write_text("somebody else")
    assert verdict_on(path, name=name) is TreeVerdict.UNKNOWN, "the content is not as recorded"


def test_its_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_next_program_hears_nothing_of_it(lock: TreeLock) -> None:
    code = "import os; print(sorted(name for name in os.environ if name.startswith('EVERBEAT_')))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "EVERBEAT_TREE_LOCK" not in seen
    assert verdict(lock) is TreeVerdict.HELD
