"""Tests mirror the rooms of `src/everbeat`; stories, chaos, architecture and docs have their own folders."""
