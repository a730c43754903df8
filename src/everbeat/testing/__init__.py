"""Utilities for testing programs that use everbeat."""
