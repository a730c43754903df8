"""The fixtures for workers and observers, because tests of the supervisor need both."""

from tests.recovering.conftest import db, observer
from tests.worker.conftest import harness

__all__ = ["db", "harness", "observer"]
