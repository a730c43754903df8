"""The ways to detect a death, with one module for each.

`session`: PostgreSQL released the session lock of a whole process tree. `age`: a tree has sent no heartbeat for its stale threshold.
`startup`: the processes and lock files of this host prove a death. `stall`: the code of a living worker reports no progress. The fifth
way, the exit of a child process, is in `supervisor/supervisor.py`.
"""
