"""`python -m tests.surface [NAME ...]` renews the records: all of them, or those that are named."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from everbeat.embedded.server import EmbeddedServer
from tests.conftest import FAST_SETTINGS
from tests.surface.every_record import (
    NAMES,
    OF_A_DATABASE,
    OF_PROCESSES,
    OF_THE_PACKAGE,
    of_a_database,
    unknown,
)
from tests.surface.record import Record


def main(names: Sequence[str]) -> None:
    """Renew the records and say which of them changed."""
    if wrong := unknown(names):
        sys.exit(f"There is no record {', '.join(wrong)}. Records: {', '.join(NAMES)}.")
    chosen = names or NAMES
    for record in (*OF_THE_PACKAGE, *OF_PROCESSES):
        if record.name in chosen:
            _renew(record)
    if not set(chosen) & set(OF_A_DATABASE):
        return
    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer.open(Path(folder), settings=FAST_SETTINGS) as server,
    ):
        for name in OF_A_DATABASE:
            if name in chosen:
                _renew(of_a_database(name, url=server.url, schema=f"record_of_{name}"))


def _renew(record: Record) -> None:
    print(f"{record.name}: {'renewed' if record.renew() else 'unchanged'}")


if __name__ == "__main__":
    main(sys.argv[1:])
