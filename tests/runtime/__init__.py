"""Tests of the runtime room: real processes, real signals, no database."""
