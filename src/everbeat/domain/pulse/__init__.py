"""The pulse of the installation: what is sampled each second, and what it means. Pure functions."""
