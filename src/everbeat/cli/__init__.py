"""The `everbeat` command. Its entry point is `everbeat.cli.entry:main`.

This file imports nothing, because worker and task processes start from modules of this package and must not load terminal libraries.
"""
