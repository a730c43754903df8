"""Small programs that the tests of the runtime room start as real processes."""
