"""The door to PostgreSQL: typed statements, sessions, migrations. No other room opens a connection."""
