"""Who runs tasks: the supervisor and its worker processes, which claim, start, execute and settle."""
