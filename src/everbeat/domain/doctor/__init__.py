"""The checks of `everbeat doctor`: verdicts on facts that other modules collect. Pure code without I/O, clock or randomness."""
