"""Supervisors, which start, monitor and replace worker processes, send their heartbeats, and clean up after them.

A supervisor imports no user code.
"""
