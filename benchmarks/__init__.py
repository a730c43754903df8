"""Comparisons of everbeat with other queues and with other versions of itself. They are not part of the installed package."""
