"""The observer fixture of the recovery tests, because maintenance also runs in a supervisor."""

from tests.recovering.conftest import db, observer

__all__ = ["db", "observer"]
