"""Sync and async interfaces for sending tasks and waiting for their results: task objects, calls and handles."""
