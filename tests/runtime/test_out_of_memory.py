from __future__ import annotations

from pathlib import Path

import pytest

from everbeat.runtime.processes import OutOfMemoryCounter, find_counter_file, read_counter

V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def lay_out(folder: Path, *, mounts: str, membership: str, counter: str, text: str) -> Path | None:
    """Write the files of a machine under `folder` as the kernel does, and return the counter file that is found."""
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
def test_the_oom_counter_of_the_own_cgroup_is_found(
    tmp_path: Path, mounts: str, membership: str, counter: str, text: str, count: int
) -> None:
    found = lay_out(tmp_path, mounts=mounts, membership=membership, counter=counter, text=text)
    assert found == tmp_path / counter
    assert read_counter(found) == count


def test_without_an_oom_counter_no_death_is_attributed_to_memory(tmp_path: Path) -> None:
    assert find_counter_file(mounts=tmp_path / "none", membership=tmp_path / "none") is None
    counter = OutOfMemoryCounter(tmp_path / "none")
    assert counter.read() is None
    assert not counter.explains_a_death()


def test_each_rise_of_the_oom_counter_explains_one_death(tmp_path: Path) -> None:
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 1\n")
    counter = OutOfMemoryCounter(file)
    assert not counter.explains_a_death()
    file.write_text("oom_kill 3\n")
    assert [counter.explains_a_death() for _ in range(3)] == [True, True, False]
    file.write_text("oom_kill 0\n")
    assert not counter.explains_a_death()


def test_the_oom_counter_of_this_machine_is_a_number_or_none() -> None:
    count = OutOfMemoryCounter().read()
    assert count is None or count >= 0
