"""Tracing: what tracers see of the work, the carriers that are stored with tasks, and the names of attributes."""
