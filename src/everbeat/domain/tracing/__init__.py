"""Tracing: the records that tracers get about the work, the carriers that are stored with tasks, and the names of attributes."""
