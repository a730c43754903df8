"""Metrics in the text format of Prometheus: their names, and the text."""
