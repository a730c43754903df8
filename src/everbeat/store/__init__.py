"""Access to PostgreSQL: typed statements, sessions, migrations. No other package opens a connection."""
