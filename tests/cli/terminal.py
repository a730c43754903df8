"""Run a command at a real terminal and find the bytes that control the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOSTILE = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[5m\x9b31m\x7f\r\u202e\u2066\u200b\x08 [bold]:bomb:[link=https://x.y]z[/link] \U000e0041"
"""A title, the clipboard, a cleared screen, blinking, the C1 form of an escape, backspaces, reordering, markup and an emoji code."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_BLINK = re.compile(r"\x1b\[(?:[0-9;]*;)?5m")
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)


_EACH = """
import json, sys
from everbeat.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        print("exit", end.code or 0, ascii(words[:2]))
"""


def at_terminal(
    commands: Sequence[Sequence[str]],
    *,
    folder: Path,
    environment: Mapping[str, str],
    columns: int = 200,
    term: str = "xterm-256color",
) -> str:
    """Run commands, one after the other, at a terminal with this many columns; return their output."""
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _EACH, json.dumps(commands)],
            cwd=folder,
            env={
                **environment,
                "TERM": term,
                "COLUMNS": str(columns),
                "PYTHONIOENCODING": "utf-8",
            },
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
    finally:
        os.close(follower)
    written = b""
    try:
        while part := _read(leader):
            written += part
    finally:
        os.close(leader)
    process.wait(timeout=60)
    return written.decode()


def pages_at_terminal(
    commands: Sequence[Sequence[str]], *, folder: Path, environment: Mapping[str, str], columns: int
) -> list[str]:
    """Run commands at a terminal; return what each wrote, without colours."""
    written = at_terminal(commands, folder=folder, environment=environment, columns=columns)
    plain = _STYLE.sub("", written).replace("\r\n", "\n")
    return re.split(r"(?m)^exit \d+ \[.*\]\n", plain)[:-1]


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65_536)
    except OSError:  # Linux reports the end of the last writer by this error
        return b""


def obeyed(written: str) -> list[str]:
    """Return the control sequences that a terminal would obey, except colours and line ends, with the text around them."""
    plain = _STYLE.sub("", written).replace("\r\n", "\n")
    found = [plain[max(0, at.start() - 30) : at.end() + 10] for at in _OBEYED.finditer(plain)]
    return found + _BLINK.findall(written)
