"""Tests of what the dashboard makes of the pulse."""
