"""Chaos: a seeded plan of faults on a private cluster with real workers, judged by what was written outside the database.

`python -m tests.chaos --seed 1 --seconds 60`, or `make chaos SEED=1 SECONDS=60`. The parts, from pure to rude:

    plan      what happens when, written before anything starts
    evidence  what is known afterwards, as plain values; `oracles`, `silence` and `figures` judge it, pure
    program   the task code, `producer` those who send it: both write what they did to files that only grow
    nats_side, nats_line, nats_faults
              the NATS server of a run with --nats, lines to it, and what is done to both
    line      a TCP proxy that cuts, delays, half-opens and loses replies
    cluster   a PostgreSQL with a clock that can be shifted and a disk that can be filled
    faults    how each kind of fault is done to them; `director` does it by the plan
    report    words and JSON
"""
