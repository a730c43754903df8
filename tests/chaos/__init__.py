"""Chaos tests: a seeded plan of faults on a private cluster with real workers, judged by evidence outside the database.

Run `python -m tests.chaos --seed 1 --seconds 60`, or `make chaos SEED=1 SECONDS=60`. The modules, from pure code to faults:

    plan      The times of all faults, written before anything starts.
    evidence  The facts after a run, as plain values. `oracles`, `silence` and `figures` evaluate them without side effects.
    program   The task code. `producer` and `around` send the tasks. All record their actions in append-only files.
    nats_side, nats_line, nats_faults
              The NATS server of a run with --nats, the connections to it, and the faults of both.
    line      A TCP proxy that cuts, delays and half-opens connections, and loses replies.
    cluster   A PostgreSQL server with a clock that can be shifted and a disk that can be filled.
    faults    The injection of each type of fault. `director` follows the plan.
    report    The results as text and JSON.
"""
