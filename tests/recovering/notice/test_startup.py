"""Test start-up reconciliation and slots: which trees are provably dead, and which are left alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from psycopg import sql

from everbeat.recovering.notice.age import Reaper
from everbeat.recovering.notice.session import LivingTreesCutOff, SessionWatch
from everbeat.recovering.notice.startup import (
    PredecessorsBuried,
    Reconciliation,
    SlotHeld,
    SlotKeeper,
    SlotTaken,
    Witness,
)
from everbeat.recovering.recoverer import Recoverer
from everbeat.runtime import identity
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import MassSilence
from everbeat.runtime.identity import ProcessIdentity, TreeLock, TreeVerdict, start_ticks, verdict_on
from everbeat.store import workers
from everbeat.store.workers import SupervisorRow, predecessors, take_slot
from tests.recovering.conftest import ManualObserver, StoreHarness

IDENTITY = ProcessIdentity.current()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def gone() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with lock files of this user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return identity.own_folder()


def made_long_ago(path: Path) -> None:
    at = time.time() - 1.01 * identity.KEPT_S
    os.utime(path, (at, at))


def neighbour(db: StoreHarness, name: str, **changes: Any) -> None:
    """Insert a supervisor and its worker, by default with the process of the test."""
    row = SupervisorRow(
        id=name, hostname=IDENTITY.hostname, pid=os.getpid(), boot_id=IDENTITY.boot_id, machine_id=IDENTITY.machine_id,
        pid_namespace=str(IDENTITY.pid_namespace), process_started=start_ticks(os.getpid()),
        lock_key=db.target.lock_key(name), session_name=f"everbeat-{name}",
    )  # fmt: skip
    db.run(workers.register_supervisor(replace(row, **changes)))
    worker = workers.WorkerRow(
        id=f"{name}-w", supervisor_id=name, hostname="h", pid=1, process_started=None, queues=None
    )
    db.run(workers.register_worker(worker))


def change(db: StoreHarness, name: str, setting: str) -> None:
    text = f"update {{}}.supervisors set {setting} where id = %s"
    db.connection.execute(sql.SQL(text).format(sql.Identifier(db.target.schema)), [name])  # type: ignore[arg-type]


async def reconcile(observer: ManualObserver, identity: ProcessIdentity = IDENTITY) -> list[str]:
    environment = replace(observer.environment(), clock=SystemClock())
    return await Reconciliation(Recoverer(environment), identity=identity).run()


class TestProcess:
    async def test_only_the_provably_dead_of_this_machine_are_recovered(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:  # E10
        neighbour(db, "dead", pid=gone, process_started=1)
        neighbour(db, "reused-pid", process_started=1)
        neighbour(db, "alive")
        neighbour(db, "other-boot", pid=gone, boot_id="another", machine_id="another")
        neighbour(db, "other-namespace", pid=gone, pid_namespace="1")
        tasks = {name: db.running(f"{name}-w").id for name in ("dead", "reused-pid", "alive", "other-boot")}
        assert await reconcile(observer) == ["dead", "reused-pid"]
        states = {name: db.row(task, "state") for name, task in tasks.items()}
        assert states == {
            "dead": "FAILED",
            "reused-pid": "FAILED",
            "alive": "RUNNING",
            "other-boot": "RUNNING",
        }
        assert observer.living() == {"me", "s1", "alive", "other-boot", "other-namespace"}
        assert db.row(tasks["dead"], "error")["data"]["noticed_by"] == "startup"
        assert observer.told(PredecessorsBuried) == [
            PredecessorsBuried(supervisor_ids=("dead", "reused-pid"), tasks=2)
        ]

    async def test_equal_host_names_are_not_proof_of_the_same_machine(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:  # E10
        for name in ("web", "web-2", "my_host", "my9host"):
            neighbour(db, name, hostname=name, pid=gone, boot_id=f"kernel of {name}", machine_id=name)
        held = {name: db.running(f"{name}-w").id for name in ("web", "web-2", "my_host", "my9host")}
        for name in held:
            here = replace(IDENTITY, hostname=name)
            assert await reconcile(observer, here) == []
        assert {db.row(task, "state") for task in held.values()} == {"RUNNING"}

    async def test_a_live_session_outweighs_a_dead_process_on_a_copied_machine(
        self, observer: ManualObserver, db: StoreHarness, gone: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # E10
        monkeypatch.setattr("everbeat.recovering.notice.startup.PATIENCE_S", 0.5)
        neighbour(db, "original", pid=gone, process_started=1)
        task = db.running("original-w").id
        change(db, "original", "session_held = true")
        with db.target.connect("everbeat-original worker"):
            assert await reconcile(observer) == []
        with db.target.connect("another name") as holder:
            lock_key = db.target.lock_key("original")
            holder.execute("select pg_advisory_lock(%s)", [lock_key])
            assert await reconcile(observer) == []
        assert db.row(task, "state") == "RUNNING"
        assert await reconcile(observer) == ["original"]

    async def test_startup_waits_for_sessions_of_a_dead_tree_to_close(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:
        neighbour(db, "dying", pid=gone, process_started=1)
        change(db, "dying", "session_held = true")
        session = db.target.connect("everbeat-dying supervisor")
        asyncio.get_running_loop().call_later(0.5, session.close)
        assert await reconcile(observer) == ["dying"]

    async def test_sessions_behind_a_pooler_do_not_count_as_a_sign_of_life(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:
        neighbour(db, "pooled", pid=gone, process_started=1)  # the tree never held a session lock
        with db.target.connect("everbeat-pooled worker"):
            assert await reconcile(observer) == ["pooled"]


class TestMassSilence:
    """The mass-silence guard applies to trees without a proof of death; a proven death does not count as silence."""

    FAST: Mapping[str, int] = {
        "runner_heartbeat_interval_ms": 1_000, "claimer_heartbeat_interval_ms": 1_000, "running_stale_threshold_ms": 2_000,
        "claimed_stale_threshold_ms": 2_000, "check_interval_ms": 1_000,
    }  # fmt: skip

    async def looks(self, observer: ManualObserver, *, asks: bool = True) -> None:
        recoverer = observer.recoverer(**self.FAST)
        reaper = Reaper(recoverer, witness=Witness(recoverer, identity=IDENTITY, proves_deaths=asks))
        for _ in range(4):
            await observer.clock.advance(1.0)
            observer.beat("me", "s1")
            await reaper.tick()

    async def test_provably_dead_trees_are_recovered_at_their_threshold_without_a_mass_silence(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:  # E14
        for name in ("dead", "dead-2"):
            neighbour(db, name, pid=gone, process_started=1)
        tasks = [db.running("dead-w").id, db.running("dead-2-w").id]
        await self.looks(observer)
        assert [db.row(task, "state") for task in tasks] == ["FAILED", "FAILED"]
        assert {row[0] for row in db.table("recoveries", "noticed_by")} == {"age"}
        assert observer.living() == {"me", "s1"}
        assert observer.told(MassSilence) == []

    async def test_silent_trees_without_a_proof_of_death_still_count_as_a_mass_silence(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:  # E14
        neighbour(db, "dead", pid=gone, process_started=1)
        neighbour(db, "frozen")
        for name in ("elsewhere", "elsewhere-2"):
            neighbour(db, name, pid=gone, boot_id="another", machine_id="another")
        names = ("dead", "frozen", "elsewhere", "elsewhere-2")
        tasks = {name: db.running(f"{name}-w").id for name in names}
        await self.looks(observer)
        states = {name: db.row(task, "state") for name, task in tasks.items()}
        assert states == {name: "FAILED" if name == "dead" else "RUNNING" for name in names}
        assert len(observer.told(MassSilence)) == 1

    async def test_dead_trees_without_a_proof_of_death_count_as_a_mass_silence(
        self, observer: ManualObserver, db: StoreHarness, gone: int
    ) -> None:
        for name in ("dead", "dead-2"):
            neighbour(db, name, pid=gone, process_started=1)
        task = db.running("dead-w").id
        await self.looks(observer, asks=False)
        assert db.row(task, "state") == "RUNNING"
        assert len(observer.told(MassSilence)) == 1


class TestLockFile:
    def mate(self, db: StoreHarness, lock: TreeLock, **changes: Any) -> None:
        values = {"session_name": lock.name, "lock_file": str(lock.path), "pid_namespace": "1"} | changes
        neighbour(db, "mate", **values)

    async def test_a_free_lock_file_is_proof_of_death_across_pid_namespaces(
        self, observer: ManualObserver, db: StoreHarness, files: Path
    ) -> None:  # E10
        lock = TreeLock.take()
        self.mate(db, lock)
        task = db.running("mate-w").id
        assert await reconcile(observer) == []
        lock.release(remove=False)
        assert await reconcile(observer) == ["mate"]
        cause = db.row(task, "error")["data"]["cause"]
        assert "lock file is free" in cause
        assert cause.endswith("seen by a supervisor on the same machine"), (
            "the tree might have run there for a long time"
        )
        assert list(files.iterdir()) == [], "the supervisor that proved the death removes the file"

    async def test_a_held_lock_file_outweighs_a_process_that_is_gone(
        self,
        observer: ManualObserver,
        db: StoreHarness,
        files: Path,
        gone: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("everbeat.recovering.notice.startup.PATIENCE_S", 0.5)
        lock = TreeLock.take()
        self.mate(db, lock, pid=gone, process_started=1, pid_namespace=str(IDENTITY.pid_namespace))
        assert await reconcile(observer) == [], "one of its children still runs"
        asyncio.get_running_loop().call_later(0.3, lambda: lock.release(remove=False))
        assert await reconcile(observer) == ["mate"]

    async def test_a_free_lock_file_of_a_live_process_is_not_proof_of_death(
        self, observer: ManualObserver, db: StoreHarness, files: Path
    ) -> None:
        lock = TreeLock.take()
        self.mate(db, lock, pid_namespace=str(IDENTITY.pid_namespace))
        lock.release(remove=False)
        assert await reconcile(observer) == [], "the process might have closed the file by accident"

    @pytest.mark.parametrize("boot", ["another", None])
    async def test_a_free_lock_file_of_another_kernel_is_not_proof_of_death(
        self, observer: ManualObserver, db: StoreHarness, files: Path, boot: str | None
    ) -> None:
        lock = TreeLock.take()
        self.mate(db, lock, boot_id=boot, machine_id=None)
        lock.release(remove=False)
        assert await reconcile(observer) == []

    async def test_only_lock_files_of_trees_that_were_ended_are_removed(
        self, observer: ManualObserver, db: StoreHarness, files: Path
    ) -> None:
        ended, stranger, held = TreeLock.take(), TreeLock.take(), TreeLock.take()
        self.mate(db, ended)
        db.run(workers.end_supervisor("mate", how="session"))
        ended.release(remove=False)
        stranger.release(remove=False)  # belongs to another database
        assert await reconcile(observer) == []
        assert set(files.iterdir()) == {stranger.path, held.path}
        held.release(remove=True)

    async def test_lock_files_of_lost_databases_are_removed_a_month_after_they_were_found(
        self, observer: ManualObserver, files: Path
    ) -> None:
        old, held = TreeLock.take(), TreeLock.take()
        old.release(remove=False)
        for lock in (old, held):
            made_long_ago(lock.path)  # trees can live for months
        await reconcile(observer)
        assert verdict_on(str(old.path), name=old.name) is TreeVerdict.GONE, (
            "other supervisors might need the proof"
        )
        await reconcile(observer)
        assert set(files.iterdir()) == {old.path, held.path}, "the file was found just now"
        made_long_ago(old.path)
        await reconcile(observer)
        assert set(files.iterdir()) == {held.path}
        held.release(remove=False)
        await reconcile(observer)
        assert set(files.iterdir()) == {held.path}, "the file counts from its discovery and not from its age"


class TestReboot:
    def former(self, db: StoreHarness, **changes: Any) -> None:
        neighbour(db, "former", boot_id="before", **changes)
        held_here = f"session_held = true, session_server = {db.target.schema}.server_incarnation()"
        change(db, "former", f"{held_here}, last_beat_at = now() - interval '1 hour'")

    @pytest.fixture(autouse=True)
    def booted_ten_minutes_ago(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("everbeat.recovering.notice.startup.uptime_ms", lambda: 600_000)

    here = replace(IDENTITY, machine_id="this machine")

    async def test_a_restart_of_this_machine_is_proof_of_death(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:  # E10
        self.former(db, machine_id="this machine")
        task = db.running("former-w").id
        assert await reconcile(observer, self.here) == ["former"]
        assert "restarted" in db.row(task, "error")["data"]["cause"]

    @pytest.mark.parametrize(
        ("setting", "why"),
        [
            (
                "last_beat_at = now() - interval '5 minutes'",
                "it beat since this boot: another machine of that id",
            ),
            ("session_held = false", "without a session there is nothing against a copy"),
            ("machine_id = 'another'", "another machine"),
            ("machine_id = null", "nobody knows which machine"),
            ("boot_id = null", "nobody knows which boot"),
        ],
    )
    async def test_a_restart_without_certain_identity_is_not_proof_of_death(
        self, observer: ManualObserver, db: StoreHarness, setting: str, why: str
    ) -> None:
        self.former(db, machine_id="this machine")
        change(db, "former", setting)
        assert await reconcile(observer, self.here) == [], why

    async def test_a_tree_of_a_former_primary_has_time_to_come_back(
        self, observer: ManualObserver, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # J16
        """The tree might live on another machine of the same image. If this machine and the server restarted, it is dead."""
        monkeypatch.setattr("everbeat.recovering.notice.startup.RETURN_S", 1.0)
        monkeypatch.setattr("everbeat.recovering.notice.startup.RETURN_S", 1.0)
        self.former(db, machine_id="this machine")
        change(db, "former", "session_server = 'another'")
        asyncio.get_running_loop().call_later(0.4, observer.beat, "former")
        assert await reconcile(observer, self.here) == [], "the tree came back"
        change(db, "former", "last_beat_at = now() - interval '1 hour'")
        began = SystemClock().monotonic()
        assert await reconcile(observer, self.here) == ["former"]
        assert SystemClock().monotonic() - began >= 1.0

    async def test_a_live_tree_on_a_machine_of_the_same_image_keeps_its_tasks(
        self, observer: ManualObserver, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("everbeat.recovering.notice.startup.PATIENCE_S", 0.3)
        self.former(db, machine_id="this machine")
        with db.target.connect("everbeat-former worker"):
            assert await reconcile(observer, self.here) == []


def witness_of(observer: ManualObserver) -> Witness:
    return Witness(observer.recoverer(), identity=IDENTITY, proves_deaths=False)


class TestLivingWithoutASession:
    """Trees whose sessions are gone and whose processes this machine sees."""

    HELD_HERE = "session_held = true, session_server = {}.server_incarnation()"

    def cut_off(self, db: StoreHarness, name: str, **changes: Any) -> None:
        neighbour(db, name, **changes)
        change(db, name, self.HELD_HERE.format(db.target.schema))

    def watch(self, observer: ManualObserver) -> SessionWatch:
        return SessionWatch(observer.recoverer(), witness=witness_of(observer))

    async def look(self, observer: ManualObserver, watch: SessionWatch, *, times: int = 4) -> None:
        for _ in range(times):
            await observer.clock.advance(1.0)
            await watch.tick()

    async def test_a_tree_without_sessions_is_ended_only_when_its_lock_file_is_free(
        self, observer: ManualObserver, db: StoreHarness, tmp_path: Path
    ) -> None:  # promise 4
        lock = TreeLock.take(tmp_path)
        # In another pid namespace its process is not visible from here.
        self.cut_off(db, "cut-off", session_name=lock.name, lock_file=str(lock.path), pid_namespace="1")
        watch = self.watch(observer)
        await self.look(observer, watch)
        assert "cut-off" in observer.living()
        (told,) = observer.told(LivingTreesCutOff)
        assert isinstance(told, LivingTreesCutOff)
        assert told.supervisor_ids == ("cut-off",)
        lock.release(remove=False)
        await self.look(observer, watch, times=1)
        assert "cut-off" not in observer.living()

    async def test_a_tree_without_sessions_is_judged_by_its_process_before_its_lock_file(
        self, observer: ManualObserver, db: StoreHarness, gone: int, tmp_path: Path
    ) -> None:
        lock = TreeLock.take(tmp_path)  # as if a child of the dead supervisor held it
        self.cut_off(db, "alive")
        self.cut_off(db, "dead", pid=gone, session_name=lock.name, lock_file=str(lock.path))
        self.cut_off(db, "elsewhere", boot_id="another", machine_id="another")
        for name in ("a", "b", "c", "d"):
            neighbour(db, name)  # trees without sessions, so that three lost trees are not a mass loss
        await self.look(observer, self.watch(observer))
        lock.release(remove=True)
        assert observer.living() & {"alive", "dead", "elsewhere"} == {"alive"}

    async def test_live_trees_of_a_mass_loss_are_not_ended_after_its_wait(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:  # E14
        self.cut_off(db, "alive")
        self.cut_off(db, "elsewhere", boot_id="another", machine_id="another")
        watch = self.watch(observer)
        await self.look(observer, watch)
        assert {"alive", "elsewhere"} <= observer.living()
        await self.look(observer, watch, times=35)
        assert observer.living() & {"alive", "elsewhere"} == {"alive"}

    async def test_a_live_tree_without_sessions_keeps_its_slot(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:  # E10
        self.cut_off(db, "alive")
        assert db.run(take_slot("alive", "web-0"))
        keeper = SlotKeeper(observer.recoverer(), slot="web-0", witness=witness_of(observer))
        for _ in range(4):
            await keeper.tick()
        assert "alive" in observer.living()
        change(db, "alive", "process_started = 1")  # the pid now belongs to another process
        for _ in range(3):
            await keeper.tick()
        assert "alive" not in observer.living()


class TestSlot:
    def keeper(self, observer: ManualObserver) -> SlotKeeper:
        return SlotKeeper(observer.recoverer(), slot="web-0", witness=observer.witness())

    def slot_holder(self, db: StoreHarness) -> None:
        neighbour(db, "holder", hostname="elsewhere", boot_id="another", machine_id="another")
        assert db.run(take_slot("holder", "web-0"))
        held_here = f"session_held = true, session_server = {db.target.schema}.server_incarnation()"
        change(db, "holder", held_here)

    def holders(self, db: StoreHarness) -> list[str]:
        found = db.run(predecessors("nobody", boot_id="none", machine_id=None, slot="web-0"))
        return [each.id for each in found]

    async def test_a_vanished_holder_of_a_slot_is_ended_at_the_second_check(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:  # E10
        self.slot_holder(db)
        task = db.running("holder-w").id
        keeper = self.keeper(observer)
        assert await keeper.tick() == 0.3
        assert self.holders(db) == ["holder"]
        assert await keeper.tick() is None
        assert self.holders(db) == ["me"]
        assert db.row(task, "state") == "FAILED"
        assert "'web-0'" in db.row(task, "error")["data"]["cause"]
        assert observer.told(SlotHeld) == [SlotHeld(slot="web-0", supervisor_id="me")]

    async def test_a_live_holder_keeps_its_slot_and_the_newer_tree_reports_it_once(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:  # E10
        self.slot_holder(db)
        task = db.running("holder-w").id
        keeper = self.keeper(observer)
        with db.target.connect("everbeat-holder worker"):
            for _ in range(11):
                assert await keeper.tick() == 0.3
                await observer.clock.advance(0.3)
            assert await keeper.tick() is None
            assert await keeper.tick() is None
        assert self.holders(db) == ["holder"]
        assert db.row(task, "state") == "RUNNING"
        (told,) = observer.told(SlotTaken)
        assert isinstance(told, SlotTaken)
        assert (told.holder, told.hostname) == ("holder", "elsewhere")
        db.run(workers.end_supervisor("holder", how="left"))
        assert await keeper.tick() is None
        assert self.holders(db) == ["me"], "the waiting tree gets the slot when it is free"

    async def test_a_slot_holder_without_a_free_connection_is_not_ended(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:  # E10, J12
        self.slot_holder(db)
        keeper = self.keeper(observer)
        observer.is_served = False
        for _ in range(4):
            await keeper.tick()
        assert self.holders(db) == ["holder"]
        observer.is_served = True
        await keeper.tick()
        assert self.holders(db) == ["holder"], "the holder has the time between two checks to come back"
        await keeper.tick()
        assert self.holders(db) == ["me"]

    async def test_a_slot_holder_that_reconnected_is_not_ended(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:
        self.slot_holder(db)
        keeper = self.keeper(observer)
        await keeper.tick()
        change(db, "holder", "session_at = statement_timestamp()")
        await keeper.tick()
        assert self.holders(db) == ["holder"]

    @pytest.mark.parametrize(
        "why",
        ["the observer is pooled", "the holder never had a session", "its session was on another server"],
    )
    async def test_a_slot_holder_without_conclusive_sessions_is_not_ended(
        self, observer: ManualObserver, db: StoreHarness, why: str
    ) -> None:
        self.slot_holder(db)
        match why:
            case "the observer is pooled":
                observer.is_pooled = True
            case "the holder never had a session":
                change(db, "holder", "session_held = false")
            case _:
                change(db, "holder", "session_server = 'another'")
        keeper = self.keeper(observer)
        for _ in range(3):
            await keeper.tick()
        assert self.holders(db) == ["holder"]

    async def test_only_one_of_two_trees_that_take_a_slot_at_the_same_time_gets_it(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:
        neighbour(db, "rival")
        keeper = self.keeper(observer)
        with db.target.connect("everbeat test rival") as rival:
            rival.autocommit = False
            statement = take_slot("rival", "web-0")
            rival.execute(db.text(statement.name), statement.parameters)  # stays uncommitted for now
            tick = asyncio.ensure_future(keeper.tick())
            async with asyncio.timeout(20):
                blocked = "select 1 from pg_stat_activity where %s = any(pg_blocking_pids(pid))"
                while not db.connection.execute(blocked, [rival.info.backend_pid]).fetchone():
                    await asyncio.sleep(0.01)  # PostgreSQL sends no notice of a session that waits
            rival.commit()
            assert await tick == 0.3
        assert self.holders(db) == ["rival"]
        assert observer.told(SlotHeld) == []

    async def test_a_tree_that_returns_under_a_new_id_takes_its_slot_again(
        self, observer: ManualObserver, db: StoreHarness
    ) -> None:
        keeper = self.keeper(observer)
        await keeper.tick()
        assert await keeper.tick() is None
        db.run(workers.end_supervisor("me", how="age"))
        neighbour(db, "me-again")
        observer.supervisor_id = "me-again"
        await keeper.tick()
        assert self.holders(db) == ["me-again"]
