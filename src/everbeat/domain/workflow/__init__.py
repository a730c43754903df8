"""Workflow graphs, their validation, and the states that follow from node results. Pure code without I/O."""
