"""Executors, which run and stop task code on the event loop, in threads or in task processes."""
