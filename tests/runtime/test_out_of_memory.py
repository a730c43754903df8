from __future__ import annotations

from pathlib import Path

import pytest

from everbeat.runtime.out_of_memory import OutOfMemoryCounter, find_counter_file, read_counter

V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def lay_out(folder: Path, *, mounts: str, membership: str, counter: str, text: str) -> Path | None:
    """A machine's files as the kernel writes them, under `folder`."""
    file = folder / counter
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    (folder / "mountinfo").write_text(mounts.format(root=folder))
    (folder / "cgroup").write_text(membership)
    return find_counter_file(mounts=folder / "mountinfo", membership=folder / "cgroup")


@pytest.mark.parametrize(
    ("mounts", "membership", "counter", "text", "count"),
    [
        (
            "35 24 0:30 / {root}/fs rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
            "0::/system.slice/worker.service\n",
            "fs/system.slice/worker.service/memory.events",
            V2_EVENTS,
            2,
        ),
        (
            "35 24 0:30 / {root}/fs rw,nosuid shared:9 - cgroup2 cgroup rw\n",
            "0::/\n",
            "fs/memory.events",
            V2_EVENTS,
            2,
        ),
        (
            "36 31 0:31 / {root}/cpu rw - cgroup cgroup rw,cpu\n"
            "37 31 0:32 / {root}/mem rw - cgroup cgroup rw,memory\n",
            "4:memory:/batch\n1:cpu:/\n0::/\n",
            "mem/batch/memory.oom_control",
            V1_CONTROL,
            5,
        ),
        (
            "37 31 0:32 /docker/abc {root}/mem ro - cgroup cgroup rw,memory\n",
            "4:memory:/docker/abc\n",
            "mem/memory.oom_control",
            V1_CONTROL,
            5,
        ),
    ],
    ids=["v2", "v2 in a container", "v1", "v1 in a container"],
)
def test_the_counter_of_the_own_cgroup_is_found(
    tmp_path: Path, mounts: str, membership: str, counter: str, text: str, count: int
) -> None:
    found = lay_out(tmp_path, mounts=mounts, membership=membership, counter=counter, text=text)
    assert found == tmp_path / counter
    assert read_counter(found) == count


def test_where_there_is_no_counter_nothing_is_blamed_on_memory(tmp_path: Path) -> None:
    assert find_counter_file(mounts=tmp_path / "none", membership=tmp_path / "none") is None
    counter = OutOfMemoryCounter(tmp_path / "none")
    assert counter.read() is None
    assert not counter.explains_a_death()


def test_each_rise_explains_one_death_and_a_reset_counter_none(tmp_path: Path) -> None:
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 1\n")
    counter = OutOfMemoryCounter(file)
    assert not counter.explains_a_death()
    file.write_text("oom_kill 3\n")
    assert [counter.explains_a_death() for _ in range(3)] == [True, True, False]
    file.write_text("oom_kill 0\n")
    assert not counter.explains_a_death()


def test_the_real_machine_answers_or_says_that_it_cannot() -> None:
    count = OutOfMemoryCounter().read()
    assert count is None or count >= 0
