"""The protocol on a real PostgreSQL, under parties that do what they want when they want.

What lives here: `stage` (the database, outages, and what happens between a look and an act), `parties` (trees with real caretakers),
`ledger` (what must hold), `machine` (the rules). What may not: a copy of any decision of the code.
"""
