"""Sending tasks and waiting for them: task objects, calls, handles; a sync and an async face of each."""
