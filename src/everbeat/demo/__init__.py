"""`everbeat demo`: three trees of workers analyze real source code while the demo kills and freezes processes."""

from typing import Final

NATS_VARIABLE: Final = "EVERBEAT_DEMO_NATS"
"""The environment variable for the URL of the NATS server that notifies the demo's workers. If it is unset, PostgreSQL notifies them."""
