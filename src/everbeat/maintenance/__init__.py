"""Periodic maintenance of the schema: expiry, retention, stuck workflows and useless sessions. Leases are recovered elsewhere."""
