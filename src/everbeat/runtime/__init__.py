"""What every process of everbeat stands on: clocks, the service loop, spawned processes, channels, events.

What lives here: mechanisms that would serve any program. What may not: tasks' rows, SQL, connections, user
code. Import the files, not this package: it stays empty so that a child loads only what it needs.
"""
