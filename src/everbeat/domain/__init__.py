"""The rules of everbeat: states, retries, recovery, outcomes and codecs. Pure code without I/O, clock, randomness or SQL."""
