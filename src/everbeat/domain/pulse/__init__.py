"""The pulse of the installation: samples of all trees, and their meaning. Pure functions."""
