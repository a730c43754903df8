"""Run in a separate network namespace: open two TCP sessions, then drop all packets. Print the remaining sessions as JSON."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psycopg

from everbeat.embedded.server import EmbeddedServer
from everbeat.store.session import Session
from everbeat.store.target import Target

PORT: Final = 45_432
WITHIN_S: Final = 40.0
LEFT: Final = (
    "select split_part(application_name, ' ', 1) from pg_stat_activity where application_name like 'silent-%'"
)


async def main(server: EmbeddedServer) -> None:
    """Wait until the ordinary session has ended."""
    target = Target.parse(server.tcp_url)
    sessions = [
        Session(target, f"{name} test", patient=patient)
        for name, patient in (("silent-lock", True), ("silent-other", False))
    ]
    for session in sessions:
        await session.connection()
    with psycopg.connect(server.url, autocommit=True) as watch:

        def left() -> list[str]:
            return sorted(row[0] for row in watch.execute(LEFT))

        before = left()
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        began = time.monotonic()
        while "silent-other" in left() and time.monotonic() - began < WITHIN_S:
            await asyncio.sleep(0.2)  # the end of a backend sends no event
        print(json.dumps({"before": before, "after": left(), "took_s": time.monotonic() - began}))


subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
opened = EmbeddedServer.open(Path(sys.argv[1]), settings={"fsync": "off"}, tcp_port=PORT)
try:
    asyncio.run(main(opened))
finally:
    opened.close()
    opened.stop("immediate")
