"""Limits: how many tasks can run at the same time, and how many can start in a period."""
