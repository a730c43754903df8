"""Tests of the dashboard at the level of ASGI, with a real PostgreSQL."""
