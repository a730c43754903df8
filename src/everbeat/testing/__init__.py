"""What tests of programs that use everbeat need."""
