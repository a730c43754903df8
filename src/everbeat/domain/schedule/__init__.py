"""Schedules: when their ticks are, and what happens to each tick."""
