"""The caretakers: who notices deaths by session and by age, recovers, expires, and keeps snapshots.

What lives here: periodic services and what they do in one pass. What may not: worker processes, sending, user code.
"""
