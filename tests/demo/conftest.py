"""The command fixtures of the CLI tests, which the demo tests also use."""

from tests.cli.conftest import everbeat, forks

__all__ = ["everbeat", "forks"]
