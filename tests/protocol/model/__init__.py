"""An explicit-state model of the protocol: small enough to read, and searched whole.

What lives here: `statements` (what the database does), `world` (what everybody remembers), `workers`, `observers` and
`surroundings` (who may act when), `search` (every interleaving). What may not: everbeat's code, but for its table of moves.
"""
