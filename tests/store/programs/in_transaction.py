"""Wait for a lock inside a transaction of one kind: `in_transaction KIND URL SCHEMA SUPERVISOR`. The test freezes this process meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from everbeat.errors import DatabaseUnreachable
from everbeat.store import migrating, workers
from everbeat.store.database import Database
from everbeat.store.session import RunStatement, Session
from everbeat.store.target import Target


def by_session(target: Target, worker_id: str) -> None:
    async def beat() -> bool:
        session = Session(target, f"frozen {worker_id}")
        return await session.transact(_beat(worker_id))

    print(asyncio.run(beat()), flush=True)


def by_loop(target: Target, worker_id: str) -> None:
    async def beat() -> bool:
        database = Database(target, application_name=f"frozen {worker_id}", patience_s=60)
        return await database.atransact(_beat(worker_id))

    print(asyncio.run(beat()), flush=True)


def by_thread(target: Target, worker_id: str) -> None:
    database = Database(target, application_name=f"frozen {worker_id}", patience_s=60)
    print(database.transact(lambda run: run(workers.beat_worker(worker_id))), flush=True)


def by_migration(target: Target, worker_id: str) -> None:
    with target.connect(f"frozen {worker_id}") as connection:
        try:
            print(bool(migrating.migrate(connection, target)), flush=True)
        except DatabaseUnreachable:
            print("not migrated", flush=True)  # a command is not repeated


def _beat(worker_id: str) -> Callable[[RunStatement], object]:
    async def body(run: RunStatement) -> bool:
        beaten: bool = await run(workers.beat_worker(worker_id))
        return beaten

    return body


# The functions of the product that open a transaction, and the function here that goes through each of them.
KINDS = {
    "store/session.py _transacted": by_session,
    "store/database.py _atransacted": by_loop,
    "store/database.py _transacted": by_thread,
    "store/migrating.py _create": by_migration,
}

if __name__ == "__main__":
    kind, url, schema, worker_id = sys.argv[1:]
    KINDS[kind](Target.parse(url, schema=schema), worker_id)
