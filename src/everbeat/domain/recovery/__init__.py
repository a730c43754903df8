"""Recovery: the decision about a dead lease, the death certificate, and the hooks that can change the decision. Pure code without I/O."""
