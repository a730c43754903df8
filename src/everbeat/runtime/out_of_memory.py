"""Was it the kernel's out-of-memory killer? The counter of the own cgroup, read before and after a death.

What lives here: finding and reading that counter, cgroup v2 and v1. Everything is best effort: where it
cannot be read, a death by SIGKILL stays just that.
"""

from __future__ import annotations

from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_MEMBERSHIP = Path("/proc/self/cgroup")


class OutOfMemoryCounter:
    """Tells deaths by the out-of-memory killer from others; share one among the children of one process.

    Each rise of the counter explains one death, so that a child killed by hand later is not blamed on memory.
    """

    __slots__ = ("_explained", "_file")

    def __init__(self, file: Path | None = None) -> None:
        self._file = find_counter_file() if file is None else file
        self._explained = self.read()

    def read(self) -> int | None:
        """Kills so far in this cgroup, None where the system does not tell."""
        return None if self._file is None else read_counter(self._file)

    def explains_a_death(self) -> bool:
        """Whether the counter rose since it was last asked about a death; takes one rise as explained."""
        now = self.read()
        if now is None:
            return False
        if self._explained is None or now <= self._explained:
            self._explained = now
            return False
        self._explained += 1
        return True


def read_counter(file: Path) -> int | None:
    """The `oom_kill` line of `memory.events` (v2) or `memory.oom_control` (v1); None if unreadable."""
    try:
        for line in file.read_text().splitlines():
            match line.split():
                case ["oom_kill", count]:
                    return int(count)
                case _:
                    pass
    except (OSError, ValueError):
        pass
    return None


def find_counter_file(*, mounts: Path = _MOUNTS, membership: Path = _MEMBERSHIP) -> Path | None:
    """The file that counts the kills in the cgroup of this process; None where there is none."""
    try:
        own = membership.read_text().splitlines()
        mounted = mounts.read_text().splitlines()
    except OSError:
        return None
    for candidate in _candidates(own, mounted):
        if read_counter(candidate) is not None:
            return candidate
    return None


def _candidates(own: list[str], mounted: list[str]) -> list[Path]:
    candidates: list[Path] = []
    for line in own:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            kind, name = "cgroup2", "memory.events"
        elif "memory" in controllers.split(","):
            kind, name = "cgroup", "memory.oom_control"
        else:
            continue
        for mount_point, root, file_system, options in map(_mount, mounted):
            if file_system != kind or (kind == "cgroup" and "memory" not in options.split(",")):
                continue
            # A container sees its own cgroup as the root of the mount while its membership names the host's
            # path.
            inside = path.removeprefix(root) if root != "/" else path
            candidates += [Path(mount_point) / inside.lstrip("/") / name, Path(mount_point) / name]
    return candidates


def _mount(line: str) -> tuple[str, str, str, str]:
    # Fields 4 and 5 are root and mount point; after a lone dash come type, source and options.
    left, _, right = line.partition(" - ")
    fields, kind = left.split(), right.split()
    if len(fields) < 5 or len(kind) < 3:
        return "", "", "", ""
    return fields[4], fields[3], kind[0], kind[2]
