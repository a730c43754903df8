"""`everbeat bench` measures everbeat on this machine and, in the same run, compares it with plain PostgreSQL.

The comparisons in the top-level folder `benchmarks` use the public names of this package's modules and no other internals.
"""

from typing import Final

NATS_VARIABLE: Final = "EVERBEAT_BENCH_NATS"
"""The environment variable for the URL of the second app's NATS server. `NATS_SCHEMA_VARIABLE` names that app's schema."""
NATS_SCHEMA_VARIABLE: Final = "EVERBEAT_BENCH_NATS_SCHEMA"
