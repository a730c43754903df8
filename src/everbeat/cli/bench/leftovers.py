"""The schema of a bench is its own while it lives; what one that was killed left behind, the next one removes.

What lives here: whose schema it is. What may not: what happens in it.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

from everbeat.cli.bench.watch import Plain
from everbeat.cli.output import say
from everbeat.store.statement import compose
from everbeat.store.target import Target, is_pooled

PREFIX: Final = "everbeat_bench_"
_NAME: Final = re.compile(rf"{PREFIX}[0-9a-f]{{8}}")
_BENCH: Final = "bench"


def reserve(connection: Plain, target: Target) -> None:
    """Nobody takes the schema for a leftover as long as this session lives. Before the schema is made."""
    _is_reserved(connection, target)


def remove_leftovers(connection: Plain, target: Target) -> None:
    """Drops the schemas that bear a bench's name, whose bench is gone, and in which no worker has a session; says which."""
    for name, is_made in connection.execute(compose("bench/leftovers", target.schema)).fetchall():
        other = Target(url=target.url, schema=name)
        if name == target.schema or not _NAME.fullmatch(name) or not _is_reserved(connection, other):
            continue
        if not is_made or not _has_workers(connection, name):
            connection.execute(compose("schema/drop_schema", name))
            say(f"removed: {name}, left behind by a bench that was killed")
        connection.execute(compose("bench/release", name), {"lock_key": other.lock_key(_BENCH)})


def _is_reserved(connection: Plain, target: Target) -> bool:
    """Whether it is ours now; behind a transaction pooler, where sessions keep nothing, it never is."""
    if is_pooled(cast(Any, connection)):
        return False
    row = connection.execute(
        compose("bench/reserve", target.schema), {"lock_key": target.lock_key(_BENCH)}
    ).fetchone()
    return bool(row and row[0])


def _has_workers(connection: Plain, schema: str) -> bool:
    row = connection.execute(compose("bench/has_workers", schema)).fetchone()
    return bool(row and row[0])
