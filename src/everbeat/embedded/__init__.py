"""The embedded PostgreSQL: a server in a folder that all processes of a user share."""
