"""Recovery: detect that the holder of a lease is dead, decide what happens to its tasks, and store the decision.

The `notice` package has one module for each way to detect a death. All of them use the `Recoverer` in `recoverer.py`. `orders.py`
gets the decision for each lease from `domain/recovery/decision.py`. This package imports no user code, and calls hooks through
`HookRunner`.
"""
