"""Adapters of other queues: one stand-alone program each, run in that queue's own environment.

Each reads the libpq URL of an empty database of its own in DATABASE_URL and the number of jobs as its argument, lets its
queue do what everbeat does in the same run, and prints one JSON document: bulk_per_s, single_per_s, drain_per_s,
latency_p50_ms, latency_p99_ms. What it cannot measure is null; a job that did not run exactly once ends it with an error.

What may not live here: anything of everbeat, which is not there where these programs run.
"""
