"""Claiming: when to claim, which tasks to claim, and the slots in which they run."""
