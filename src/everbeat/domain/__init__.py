"""What is decided: states, retries, recovery, outcomes, the codec. Pure: no I/O, no clock, no chance, no SQL."""
