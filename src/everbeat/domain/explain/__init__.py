"""Explanations of the state of a task or workflow, as reasons with codes. Pure code without I/O."""
