"""Puts the parts together."""
