"""The protocol on a real PostgreSQL, with parties that act in random order."""
