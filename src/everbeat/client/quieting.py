"""Quiet trees: their workers claim nothing, by an operator's order, while what they run goes on.

What lives here: `Quieting`, this part of an app.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everbeat.client.inspection import Inspection
from everbeat.client.twins import awaiting, blocking
from everbeat.domain.checks import instance_of, sequence_of, switch
from everbeat.domain.inspection import QuietTree
from everbeat.domain.settings import refused
from everbeat.errors import UnknownName
from everbeat.store import inspect, sweeping
from everbeat.store.plan import Plan, ask
from everbeat.store.quiet import quiet

_ids: Final = sequence_of(instance_of(str), shortest=1, longest=10_000)
_MOST: Final = 100_000


class Quieting(Inspection):
    """Every method has a twin to await."""

    def _quiet_workers(
        self, ids: Sequence[str] = (), /, *, host: str | None = None, everyone: bool = False
    ) -> Plan[list[QuietTree]]:
        """Lets these supervisors claim nothing until they are resumed or end; what they run goes on, and they go on beating.

        `ids`: of supervisors, or of workers, each of which stands for its whole tree; or all on a `host`, or `everyone`. Trees that start
        later are not quiet. Returns all that are quiet now; raises UnknownName before anything is done.

        app.quiet_workers(host="web-1")
        """
        return self._order("quiet_workers", ids, host=host, everyone=everyone, on=True)

    def _resume_workers(
        self, ids: Sequence[str] = (), /, *, host: str | None = None, everyone: bool = False
    ) -> Plan[list[QuietTree]]:
        """Lets these supervisors claim again, at once; chosen as in `quiet_workers`. Returns all that claim now."""
        return self._order("resume_workers", ids, host=host, everyone=everyone, on=False)

    def _order(
        self, name: str, ids: Sequence[str], *, host: str | None, everyone: bool, on: bool
    ) -> Plan[list[QuietTree]]:
        everyone = switch(everyone, subject=f"{name}.everyone")
        if sum((bool(ids), host is not None, everyone)) != 1:
            raise refused(
                {"ids": list(ids), "host": host, "everyone": everyone},
                subject=name,
                code="CONTRADICTION",
                rule="needs exactly one of ids, host and everyone",
                fix="give ids, or host='web-1', or everyone=True",
                shell_fix="give ids, or --host web-1, or --all",
            )
        chosen: tuple[str, ...] = _ids(ids, subject=f"{name}.ids") if ids else ()
        yield from self._known(chosen, host=host)
        return (
            yield from ask(quiet(chosen, host=host, everyone=everyone, quiet=on, channel=self.door.channel))
        )

    def _known(self, ids: Sequence[str], *, host: str | None) -> Plan[None]:
        """Raises UnknownName where a name means no supervisor that has not ended."""
        if not ids and host is None:
            return
        trees = yield from ask(
            inspect.supervisors(stale_ms=self._alive_within_ms, ended_too=True, limit=_MOST)
        )
        live = [each for each in trees if each.ended_at is None]
        if host is not None:
            hosts = {each.hostname for each in live}
            if host not in hosts:
                raise UnknownName("host", [host], known=hosts)
            return
        workers = yield from ask(sweeping.known_workers())
        known = {each.supervisor_id for each in live} | {each.id for each in workers if not each.is_ended}
        former = {each.supervisor_id for each in trees} | {each.id for each in workers}
        if unknown := [name for name in ids if name not in known]:
            raise UnknownName("worker", unknown, known=known, former=former - known)

    quiet_workers = blocking(_quiet_workers)
    aquiet_workers = awaiting(_quiet_workers)
    resume_workers = blocking(_resume_workers)
    aresume_workers = awaiting(_resume_workers)
