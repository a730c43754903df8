"""Start-up reconciliation and slots: who is provably dead, and who is not touched."""

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

from everbeat.config import RecoveryConfig
from everbeat.runtime import tree_lock
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import MassSilence
from everbeat.runtime.identity import ProcessIdentity, start_ticks
from everbeat.runtime.tree_lock import TreeLock, TreeVerdict, verdict_on
from everbeat.services.reaper import Reaper
from everbeat.services.session_watch import LivingTreesCutOff, SessionWatch
from everbeat.services.slot import SlotHeld, SlotKeeper, SlotTaken
from everbeat.services.startup import PredecessorsBuried, Reconciliation
from everbeat.services.witness import Witness
from everbeat.store import workers
from everbeat.store.predecessors import predecessors, take_slot
from everbeat.store.workers import SupervisorRow
from tests.services.conftest import Hands, Onlooker

IDENTITY = ProcessIdentity.current()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def gone() -> int:
    """The pid of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's folder of lock files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tree_lock.own_folder()


def made_long_ago(path: Path) -> None:
    at = time.time() - 1.01 * tree_lock.KEPT_S
    os.utime(path, (at, at))


def neighbour(hands: Hands, name: str, **changes: Any) -> None:
    """A supervisor and its worker, whose process is this very one unless said otherwise."""
    row = SupervisorRow(
        id=name, hostname=IDENTITY.hostname, pid=os.getpid(), boot_id=IDENTITY.boot_id, machine_id=IDENTITY.machine_id,
        pid_namespace=str(IDENTITY.pid_namespace), process_started=start_ticks(os.getpid()),
        lock_key=hands.target.lock_key(name), session_name=f"everbeat-{name}",
    )  # fmt: skip
    hands.run(workers.register_supervisor(replace(row, **changes)))
    worker = workers.WorkerRow(
        id=f"{name}-w", supervisor_id=name, hostname="h", pid=1, process_started=None, queues=None
    )
    hands.run(workers.register_worker(worker))


def change(hands: Hands, name: str, setting: str) -> None:
    text = f"update {{}}.supervisors set {setting} where id = %s"
    hands.connection.execute(sql.SQL(text).format(sql.Identifier(hands.target.schema)), [name])  # type: ignore[arg-type]


async def reconcile(onlooker: Onlooker, identity: ProcessIdentity = IDENTITY) -> list[str]:
    return await Reconciliation(
        onlooker.session, recoverer=onlooker.recoverer(), observer=onlooker, identity=identity,
        events=onlooker.events, clock=SystemClock(),
    ).run()  # fmt: skip


class TestProcess:
    async def test_only_the_provably_dead_of_this_machine_are_recovered(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:  # E10
        neighbour(hands, "dead", pid=gone, process_started=1)
        neighbour(hands, "reused-pid", process_started=1)
        neighbour(hands, "alive")
        neighbour(hands, "other-boot", pid=gone, boot_id="another", machine_id="another")
        neighbour(hands, "other-namespace", pid=gone, pid_namespace="1")
        tasks = {
            name: hands.running(f"{name}-w").id for name in ("dead", "reused-pid", "alive", "other-boot")
        }
        assert await reconcile(onlooker) == ["dead", "reused-pid"]
        states = {name: hands.row(task, "state") for name, task in tasks.items()}
        assert states == {
            "dead": "FAILED",
            "reused-pid": "FAILED",
            "alive": "RUNNING",
            "other-boot": "RUNNING",
        }
        assert onlooker.living() == {"me", "s1", "alive", "other-boot", "other-namespace"}
        assert hands.row(tasks["dead"], "error")["data"]["noticed_by"] == "startup"
        assert onlooker.told(PredecessorsBuried) == [
            PredecessorsBuried(supervisor_ids=("dead", "reused-pid"), tasks=2)
        ]

    async def test_names_of_hosts_prove_nothing(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:  # E10
        for name in ("web", "web-2", "my_host", "my9host"):
            neighbour(hands, name, hostname=name, pid=gone, boot_id=f"kernel of {name}", machine_id=name)
        held = {name: hands.running(f"{name}-w").id for name in ("web", "web-2", "my_host", "my9host")}
        for name in held:
            here = replace(IDENTITY, hostname=name)
            assert await reconcile(onlooker, here) == []
        assert {hands.row(task, "state") for task in held.values()} == {"RUNNING"}

    async def test_a_session_outweighs_it_since_the_machine_may_be_a_copy(
        self, onlooker: Onlooker, hands: Hands, gone: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # E10
        monkeypatch.setattr("everbeat.services.startup.PATIENCE_S", 0.5)
        neighbour(hands, "original", pid=gone, process_started=1)
        task = hands.running("original-w").id
        change(hands, "original", "session_held = true")
        with hands.target.connect("everbeat-original worker"):
            assert await reconcile(onlooker) == []
        with hands.target.connect("another name") as holder:
            hands_off = hands.target.lock_key("original")
            holder.execute("select pg_advisory_lock(%s)", [hands_off])
            assert await reconcile(onlooker) == []
        assert hands.row(task, "state") == "RUNNING"
        assert await reconcile(onlooker) == ["original"]

    async def test_sessions_that_take_a_moment_to_go_are_waited_for(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:
        neighbour(hands, "dying", pid=gone, process_started=1)
        change(hands, "dying", "session_held = true")
        session = hands.target.connect("everbeat-dying supervisor")
        asyncio.get_running_loop().call_later(0.5, session.close)
        assert await reconcile(onlooker) == ["dying"]

    async def test_behind_a_pooler_sessions_of_its_name_say_nothing(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:
        neighbour(hands, "pooled", pid=gone, process_started=1)  # it never held a session lock
        with hands.target.connect("everbeat-pooled worker"):
            assert await reconcile(onlooker) == ["pooled"]


class TestMassSilence:
    """The brake holds for those of whom nobody knows; a death that this machine proves is no silence."""

    FAST: Mapping[str, int] = {
        "runner_heartbeat_interval_ms": 1_000, "claimer_heartbeat_interval_ms": 1_000, "running_stale_threshold_ms": 2_000,
        "claimed_stale_threshold_ms": 2_000, "check_interval_ms": 1_000,
    }  # fmt: skip

    async def looks(self, onlooker: Onlooker, *, asks: bool = True) -> None:
        recoverer = onlooker.recoverer(**self.FAST)
        witness = Witness(onlooker.session, recoverer=recoverer, observer=onlooker, identity=IDENTITY)
        reaper = Reaper(
            onlooker.session, RecoveryConfig(**self.FAST), recoverer=recoverer, observer=onlooker, events=onlooker.events,
            clock=onlooker.clock, witness=witness if asks else None,
        )  # fmt: skip
        for _ in range(4):
            await onlooker.clock.advance(1.0)
            onlooker.beat("me", "s1")
            await reaper.tick()

    async def test_two_of_four_that_died_on_this_machine_are_recovered_by_their_threshold(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:  # E14
        for name in ("dead", "dead-2"):
            neighbour(hands, name, pid=gone, process_started=1)
        tasks = [hands.running("dead-w").id, hands.running("dead-2-w").id]
        await self.looks(onlooker)
        assert [hands.row(task, "state") for task in tasks] == ["FAILED", "FAILED"]
        assert {row[0] for row in hands.table("recoveries", "noticed_by")} == {"age"}
        assert onlooker.living() == {"me", "s1"}
        assert onlooker.told(MassSilence) == []

    async def test_those_of_whom_nobody_knows_are_waited_for_all_the_same(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:  # E14
        neighbour(hands, "dead", pid=gone, process_started=1)
        neighbour(hands, "frozen")
        for name in ("elsewhere", "elsewhere-2"):
            neighbour(hands, name, pid=gone, boot_id="another", machine_id="another")
        names = ("dead", "frozen", "elsewhere", "elsewhere-2")
        tasks = {name: hands.running(f"{name}-w").id for name in names}
        await self.looks(onlooker)
        states = {name: hands.row(task, "state") for name, task in tasks.items()}
        assert states == {name: "FAILED" if name == "dead" else "RUNNING" for name in names}
        assert len(onlooker.told(MassSilence)) == 1

    async def test_without_a_proof_the_brake_holds_for_them_too(
        self, onlooker: Onlooker, hands: Hands, gone: int
    ) -> None:
        for name in ("dead", "dead-2"):
            neighbour(hands, name, pid=gone, process_started=1)
        task = hands.running("dead-w").id
        await self.looks(onlooker, asks=False)
        assert hands.row(task, "state") == "RUNNING"
        assert len(onlooker.told(MassSilence)) == 1


class TestLockFile:
    def mate(self, hands: Hands, lock: TreeLock, **changes: Any) -> None:
        values = {"session_name": lock.name, "lock_file": str(lock.path), "pid_namespace": "1"} | changes
        neighbour(hands, "mate", **values)

    async def test_a_free_one_is_proof_across_pid_namespaces(
        self, onlooker: Onlooker, hands: Hands, files: Path
    ) -> None:  # E10
        lock = TreeLock.take()
        self.mate(hands, lock)
        task = hands.running("mate-w").id
        assert await reconcile(onlooker) == []
        lock.release(remove=False)
        assert await reconcile(onlooker) == ["mate"]
        cause = hands.row(task, "error")["data"]["cause"]
        assert "lock file is free" in cause
        assert cause.endswith("seen by a supervisor on the same machine"), "it may have lived there for long"
        assert list(files.iterdir()) == [], "whoever proved it removes the file"

    async def test_a_held_one_outweighs_a_process_that_is_gone(
        self, onlooker: Onlooker, hands: Hands, files: Path, gone: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("everbeat.services.startup.PATIENCE_S", 0.5)
        lock = TreeLock.take()
        self.mate(hands, lock, pid=gone, process_started=1, pid_namespace=str(IDENTITY.pid_namespace))
        assert await reconcile(onlooker) == [], "a child of it is left"
        asyncio.get_running_loop().call_later(0.3, lambda: lock.release(remove=False))
        assert await reconcile(onlooker) == ["mate"]

    async def test_a_free_one_of_a_process_that_is_there_is_no_proof(
        self, onlooker: Onlooker, hands: Hands, files: Path
    ) -> None:
        lock = TreeLock.take()
        self.mate(hands, lock, pid_namespace=str(IDENTITY.pid_namespace))
        lock.release(remove=False)
        assert await reconcile(onlooker) == [], "it may have closed what it did not know"

    @pytest.mark.parametrize("boot", ["another", None])
    async def test_a_free_one_of_another_kernel_is_a_copy(
        self, onlooker: Onlooker, hands: Hands, files: Path, boot: str | None
    ) -> None:
        lock = TreeLock.take()
        self.mate(hands, lock, boot_id=boot, machine_id=None)
        lock.release(remove=False)
        assert await reconcile(onlooker) == []

    async def test_files_of_trees_that_others_ended_are_removed_and_no_others(
        self, onlooker: Onlooker, hands: Hands, files: Path
    ) -> None:
        ended, stranger, held = TreeLock.take(), TreeLock.take(), TreeLock.take()
        self.mate(hands, ended)
        hands.run(workers.end_supervisor("mate", how="session"))
        ended.release(remove=False)
        stranger.release(remove=False)  # of another database
        assert await reconcile(onlooker) == []
        assert set(files.iterdir()) == {stranger.path, held.path}
        held.release(remove=True)

    async def test_files_of_trees_of_lost_databases_are_removed_a_month_after_they_were_found(
        self, onlooker: Onlooker, files: Path
    ) -> None:
        old, held = TreeLock.take(), TreeLock.take()
        old.release(remove=False)
        for lock in (old, held):
            made_long_ago(lock.path)  # trees may live for months
        await reconcile(onlooker)
        assert verdict_on(str(old.path), name=old.name) is TreeVerdict.GONE, "others may need the proof"
        await reconcile(onlooker)
        assert set(files.iterdir()) == {old.path, held.path}, "it was found just now"
        made_long_ago(old.path)
        await reconcile(onlooker)
        assert set(files.iterdir()) == {held.path}
        held.release(remove=False)
        await reconcile(onlooker)
        assert set(files.iterdir()) == {held.path}, "its death is new, however old it is"


class TestReboot:
    def former(self, hands: Hands, **changes: Any) -> None:
        neighbour(hands, "former", boot_id="before", **changes)
        held_here = f"session_held = true, session_server = {hands.target.schema}.server_incarnation()"
        change(hands, "former", f"{held_here}, last_beat_at = now() - interval '1 hour'")

    @pytest.fixture(autouse=True)
    def booted_ten_minutes_ago(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("everbeat.services.startup.uptime_ms", lambda: 600_000)

    here = replace(IDENTITY, machine_id="this machine")

    async def test_another_boot_of_this_machine_is_proof(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:  # E10
        self.former(hands, machine_id="this machine")
        task = hands.running("former-w").id
        assert await reconcile(onlooker, self.here) == ["former"]
        assert "restarted" in hands.row(task, "error")["data"]["cause"]

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
    async def test_what_is_no_proof(self, onlooker: Onlooker, hands: Hands, setting: str, why: str) -> None:
        self.former(hands, machine_id="this machine")
        change(hands, "former", setting)
        assert await reconcile(onlooker, self.here) == [], why

    async def test_a_tree_of_a_former_primary_has_time_to_come_back(
        self, onlooker: Onlooker, hands: Hands, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # J16
        """It may live on another machine of the same image. Where this machine and the server were restarted, it is dead."""
        monkeypatch.setattr("everbeat.services.proof.RETURN_S", 1.0)
        monkeypatch.setattr("everbeat.services.startup.RETURN_S", 1.0)
        self.former(hands, machine_id="this machine")
        change(hands, "former", "session_server = 'another'")
        asyncio.get_running_loop().call_later(0.4, onlooker.beat, "former")
        assert await reconcile(onlooker, self.here) == [], "it came back"
        change(hands, "former", "last_beat_at = now() - interval '1 hour'")
        began = SystemClock().monotonic()
        assert await reconcile(onlooker, self.here) == ["former"]
        assert SystemClock().monotonic() - began >= 1.0

    async def test_a_machine_of_the_same_image_is_not_robbed(
        self, onlooker: Onlooker, hands: Hands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("everbeat.services.startup.PATIENCE_S", 0.3)
        self.former(hands, machine_id="this machine")
        with hands.target.connect("everbeat-former worker"):
            assert await reconcile(onlooker, self.here) == []


def witness_of(onlooker: Onlooker) -> Witness:
    return Witness(
        onlooker.session, recoverer=onlooker.recoverer(), observer=onlooker, identity=IDENTITY, proves_deaths=False
    )  # fmt: skip


class TestLivingWithoutASession:
    """Their sessions are gone, and this machine sees them."""

    HELD_HERE = "session_held = true, session_server = {}.server_incarnation()"

    def cut_off(self, hands: Hands, name: str, **changes: Any) -> None:
        neighbour(hands, name, **changes)
        change(hands, name, self.HELD_HERE.format(hands.target.schema))

    def watch(self, onlooker: Onlooker) -> SessionWatch:
        return SessionWatch(
            onlooker.session, RecoveryConfig(), recoverer=onlooker.recoverer(), observer=onlooker,
            events=onlooker.events, clock=onlooker.clock, witness=witness_of(onlooker),
        )  # fmt: skip

    async def look(self, onlooker: Onlooker, watch: SessionWatch, *, times: int = 4) -> None:
        for _ in range(times):
            await onlooker.clock.advance(1.0)
            await watch.tick()

    async def test_a_tree_whose_lock_file_is_held_is_ended_only_when_the_file_is_free(
        self, onlooker: Onlooker, hands: Hands, tmp_path: Path
    ) -> None:  # promise 4
        lock = TreeLock.take(tmp_path)
        # In a namespace of its own its process cannot be seen from here.
        self.cut_off(hands, "cut-off", session_name=lock.name, lock_file=str(lock.path), pid_namespace="1")
        watch = self.watch(onlooker)
        await self.look(onlooker, watch)
        assert "cut-off" in onlooker.living()
        (told,) = onlooker.told(LivingTreesCutOff)
        assert isinstance(told, LivingTreesCutOff)
        assert told.supervisor_ids == ("cut-off",)
        lock.release(remove=False)
        await self.look(onlooker, watch, times=1)
        assert "cut-off" not in onlooker.living()

    async def test_a_process_that_is_there_is_enough_and_one_that_is_gone_counts_more_than_its_lock_file(
        self, onlooker: Onlooker, hands: Hands, gone: int, tmp_path: Path
    ) -> None:
        lock = TreeLock.take(tmp_path)  # as if a child of the dead supervisor kept it
        self.cut_off(hands, "alive")
        self.cut_off(hands, "dead", pid=gone, session_name=lock.name, lock_file=str(lock.path))
        self.cut_off(hands, "elsewhere", boot_id="another", machine_id="another")
        for name in ("a", "b", "c", "d"):
            neighbour(hands, name)  # without a session to judge by; so three are no mass loss
        await self.look(onlooker, self.watch(onlooker))
        lock.release(remove=True)
        assert onlooker.living() & {"alive", "dead", "elsewhere"} == {"alive"}

    async def test_those_of_a_mass_loss_are_not_ended_after_its_wait(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:  # E14
        self.cut_off(hands, "alive")
        self.cut_off(hands, "elsewhere", boot_id="another", machine_id="another")
        watch = self.watch(onlooker)
        await self.look(onlooker, watch)
        assert {"alive", "elsewhere"} <= onlooker.living()
        await self.look(onlooker, watch, times=35)
        assert onlooker.living() & {"alive", "elsewhere"} == {"alive"}

    async def test_one_that_bears_a_slot_keeps_it(self, onlooker: Onlooker, hands: Hands) -> None:  # E10
        self.cut_off(hands, "alive")
        assert hands.run(take_slot("alive", "web-0"))
        keeper = SlotKeeper(
            onlooker.session, RecoveryConfig(), slot="web-0", recoverer=onlooker.recoverer(),
            observer=onlooker, events=onlooker.events, clock=onlooker.clock, witness=witness_of(onlooker),
        )  # fmt: skip
        for _ in range(4):
            await keeper.tick()
        assert "alive" in onlooker.living()
        change(hands, "alive", "process_started = 1")  # the pid is now that of another process
        for _ in range(3):
            await keeper.tick()
        assert "alive" not in onlooker.living()


class TestSlot:
    def keeper(self, onlooker: Onlooker) -> SlotKeeper:
        return SlotKeeper(
            onlooker.session, RecoveryConfig(), slot="web-0", recoverer=onlooker.recoverer(),
            observer=onlooker, events=onlooker.events, clock=onlooker.clock,
        )  # fmt: skip

    def bearer(self, hands: Hands) -> None:
        neighbour(hands, "bearer", hostname="elsewhere", boot_id="another", machine_id="another")
        assert hands.run(take_slot("bearer", "web-0"))
        held_here = f"session_held = true, session_server = {hands.target.schema}.server_incarnation()"
        change(hands, "bearer", held_here)

    def bearers(self, hands: Hands) -> list[str]:
        found = hands.run(predecessors("nobody", boot_id="none", machine_id=None, slot="web-0"))
        return [each.id for each in found]

    async def test_a_vanished_bearer_is_ended_at_the_second_look(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:  # E10
        self.bearer(hands)
        task = hands.running("bearer-w").id
        keeper = self.keeper(onlooker)
        assert await keeper.tick() == 0.3
        assert self.bearers(hands) == ["bearer"]
        assert await keeper.tick() is None
        assert self.bearers(hands) == ["me"]
        assert hands.row(task, "state") == "FAILED"
        assert "'web-0'" in hands.row(task, "error")["data"]["cause"]
        assert onlooker.told(SlotHeld) == [SlotHeld(slot="web-0", supervisor_id="me")]

    async def test_a_living_bearer_keeps_it_and_the_newer_one_says_so_once(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:  # E10
        self.bearer(hands)
        task = hands.running("bearer-w").id
        keeper = self.keeper(onlooker)
        with hands.target.connect("everbeat-bearer worker"):
            for _ in range(11):
                assert await keeper.tick() == 0.3
                await onlooker.clock.advance(0.3)
            assert await keeper.tick() is None
            assert await keeper.tick() is None
        assert self.bearers(hands) == ["bearer"]
        assert hands.row(task, "state") == "RUNNING"
        (told,) = onlooker.told(SlotTaken)
        assert isinstance(told, SlotTaken)
        assert (told.holder, told.hostname) == ("bearer", "elsewhere")
        hands.run(workers.end_supervisor("bearer", how="left"))
        assert await keeper.tick() is None
        assert self.bearers(hands) == ["me"], "the one who waits gets it when it is free"

    async def test_a_bearer_that_finds_no_free_connection_is_not_ended(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:  # E10, J12
        self.bearer(hands)
        keeper = self.keeper(onlooker)
        onlooker.is_served = False
        for _ in range(4):
            await keeper.tick()
        assert self.bearers(hands) == ["bearer"]
        onlooker.is_served = True
        await keeper.tick()
        assert self.bearers(hands) == ["bearer"], "it has the time between two looks to come back"
        await keeper.tick()
        assert self.bearers(hands) == ["me"]

    async def test_a_bearer_that_only_reconnected_is_not_ended(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:
        self.bearer(hands)
        keeper = self.keeper(onlooker)
        await keeper.tick()
        change(hands, "bearer", "session_at = statement_timestamp()")
        await keeper.tick()
        assert self.bearers(hands) == ["bearer"]

    @pytest.mark.parametrize(
        "why",
        ["the observer is pooled", "the bearer never had a session", "its session was on another server"],
    )
    async def test_without_sessions_to_judge_by_nobody_is_ended(
        self, onlooker: Onlooker, hands: Hands, why: str
    ) -> None:
        self.bearer(hands)
        match why:
            case "the observer is pooled":
                onlooker.is_pooled = True
            case "the bearer never had a session":
                change(hands, "bearer", "session_held = false")
            case _:
                change(hands, "bearer", "session_server = 'another'")
        keeper = self.keeper(onlooker)
        for _ in range(3):
            await keeper.tick()
        assert self.bearers(hands) == ["bearer"]

    async def test_of_two_that_take_it_at_the_same_moment_one_gets_it(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:
        neighbour(hands, "rival")
        keeper = self.keeper(onlooker)
        with hands.target.connect("everbeat test rival") as rival:
            rival.autocommit = False
            statement = take_slot("rival", "web-0")
            rival.execute(hands.text(statement.name), statement.parameters)  # not committed yet
            tick = asyncio.ensure_future(keeper.tick())
            async with asyncio.timeout(20):
                blocked = "select 1 from pg_stat_activity where %s = any(pg_blocking_pids(pid))"
                while not hands.connection.execute(blocked, [rival.info.backend_pid]).fetchone():
                    await asyncio.sleep(0.01)  # the server tells nobody that somebody waits
            rival.commit()
            assert await tick == 0.3
        assert self.bearers(hands) == ["rival"]
        assert onlooker.told(SlotHeld) == []

    async def test_who_comes_back_under_a_new_id_takes_it_again(
        self, onlooker: Onlooker, hands: Hands
    ) -> None:
        keeper = self.keeper(onlooker)
        await keeper.tick()
        assert await keeper.tick() is None
        hands.run(workers.end_supervisor("me", how="age"))
        neighbour(hands, "me-again")
        onlooker.supervisor_id = "me-again"
        await keeper.tick()
        assert self.bearers(hands) == ["me-again"]
