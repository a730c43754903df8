"""What an upgrade of the schema that did not end has left behind, and what an examination says of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.locks import LockHolder


class DoneStep(msgspec.Struct, frozen=True):
    """A step that was done of a version that is not applied."""

    version: int
    name: str


class UnfinishedUpgrade(msgspec.Struct, frozen=True):
    """The steps that were done of versions that are not applied, indexes whose build did not finish, and the session that migrates now."""

    schema: str
    steps: tuple[DoneStep, ...]
    invalid_indexes: tuple[str, ...]
    migrator: LockHolder | None

    @property
    def is_under_way(self) -> bool:
        """Whether a session migrates now."""
        return self.migrator is not None

    @property
    def text(self) -> str | None:
        """What was found; None where nothing was."""
        parts = []
        if self.steps:
            last = self.steps[-1]
            parts.append(
                f"the upgrade to version {last.version} is not whole: {len(self.steps)} of its steps are done, {last.name} was the last"
            )
        if self.invalid_indexes:
            parts.append(
                f"the build of {_listed(self.invalid_indexes)} did not finish: PostgreSQL writes to an invalid index and reads none"
            )
        if self.migrator is not None:
            parts.append(f"a migration is under way: {self.migrator.who}")
        return "; ".join(parts) or None

    def fix(self, *, newest_known: int) -> str | None:
        """What finishes it; None while a session is at it."""
        if self.migrator is not None or not (self.steps or self.invalid_indexes):
            return None
        if self.steps:
            is_newer = self.steps[-1].version > newest_known
            whose = " of the newer everbeat that began it" if is_newer else ""
            return f"run 'everbeat migrate'{whose}, which goes on after the last step."
        return (
            "run 'everbeat migrate' of the everbeat that began to build it, or rebuild it:"
            f' reindex index concurrently "{self.schema}"."{self.invalid_indexes[0]}"'
        )


def judge_upgrade(found: UnfinishedUpgrade, *, newest_known: int) -> Check:
    """Whether an upgrade of the schema ended half way. One that is under way is no trouble."""
    if found.text is None:
        return Check(CheckCode.UPGRADE, Verdict.OK, "no upgrade of the schema is under way or unfinished")
    verdict = Verdict.OK if found.is_under_way else Verdict.WARN
    return Check(CheckCode.UPGRADE, verdict, found.text, found.fix(newest_known=newest_known))


def _listed(names: Sequence[str]) -> str:
    return f"the index {names[0]}" if len(names) == 1 else f"the indexes {', '.join(names)}"
