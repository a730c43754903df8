"""The command `everbeat`; its entry is `everbeat.cli.main:main`.

This file imports nothing: worker and task processes start from modules of this room and must not load a terminal.
"""
