"""Builds, starts and controls workflows."""
