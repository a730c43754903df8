"""The foundation of all settings: value checks, durations, sizes, and a single error for all problems. Pure code without I/O."""
