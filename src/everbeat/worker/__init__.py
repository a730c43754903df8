"""Worker processes, which claim, start, run and settle tasks."""
