"""Where the program that NATS tells of tasks finds its schema and its server, here and in the workers.

What lives here: names of variables. What may not: an app, which would read them as soon as it is imported.
"""

from __future__ import annotations

from typing import Final

NATS_VARIABLE: Final = "EVERBEAT_BENCH_NATS"
NATS_SCHEMA_VARIABLE: Final = "EVERBEAT_BENCH_NATS_SCHEMA"
