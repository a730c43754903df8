"""Reads a Markdown document into the steps that its fenced blocks stand for. Runs nothing: `play.py` does.

An HTML comment on the line before a fence says what the block is; CONTRIBUTING.md has the list.
"""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from textwrap import dedent
from typing import Literal

FENCE = re.compile(r"^\s*(?P<ticks>```+|~~~+)\s*(?P<language>[\w-]*)")
MARK = re.compile(r"^\s*<!--\s*snippet:\s*(?P<words>.*?)\s*-->\s*$")
RUN = re.compile(r"run(?P<background> background)?(?: exit (?P<code>\d+))?")
CONSOLES = {"bash", "console", "sh", "shell"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCode:
    """A part of the document's program; `line` is where its first line stands."""

    line: int
    code: str
    kind: Literal["python"] = field(default="python", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """Text to write into a file below the working folder, or to add to its end."""

    line: int
    name: str
    text: str
    append: bool
    kind: Literal["file"] = field(default="file", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command for the shell, what it must print (nothing given: anything) and its exit code."""

    line: int
    command: str
    output: str
    background: bool
    exit_code: int
    kind: Literal["command"] = field(default="command", init=False)


Step = PythonCode | FileContent | Command


class BadSnippet(Exception):
    """The document's marks are wrong; the message names the line and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block as written; `line` is that of its opening fence."""

    line: int
    language: str
    mark: str
    text: str


def steps(text: str) -> list[Step]:
    return [step for block in _blocks(text.splitlines()) for step in _steps_of(block)]


def _blocks(lines: list[str]) -> list[Block]:
    blocks: list[Block] = []
    mark, index = "", 0
    while index < len(lines):
        if found := FENCE.match(lines[index]):
            end = _closing_fence(lines, index, found["ticks"])
            body = dedent("\n".join(lines[index + 1 : end]) + "\n")
            blocks.append(Block(line=index + 1, language=found["language"], mark=mark, text=body))
            mark, index = "", end
        elif found := MARK.match(lines[index]):
            mark = found["words"]
        elif mark:
            raise BadSnippet(f"line {index}: `snippet: {mark}` must stand on the line before a fenced block")
        index += 1
    return blocks


def _closing_fence(lines: list[str], start: int, ticks: str) -> int:
    for index in range(start + 1, len(lines)):
        if lines[index].strip().startswith(ticks) and not lines[index].strip(" `~"):
            return index
    raise BadSnippet(f"line {start + 1}: the fence {ticks} is never closed")


def _steps_of(block: Block) -> list[Step]:
    match block.mark.split():
        case [] if block.language == "python":
            return [PythonCode(line=block.line + 1, code=block.text)]
        case []:
            return []
        case ["no-run", _, *_]:
            return []
        case ["file" | "append" as verb, name] if _is_below_the_working_folder(name):
            return [FileContent(line=block.line, name=name, text=block.text, append=verb == "append")]
        case ["run", *_] if block.language in CONSOLES and (asked := RUN.fullmatch(block.mark)):
            return _commands(block, background=bool(asked["background"]), exit_code=int(asked["code"] or 0))
        case _:
            raise BadSnippet(
                f"line {block.line}: `snippet: {block.mark}` before a {block.language or 'plain'} block is "
                "none of: file NAME, append NAME, run [background] [exit N] (console blocks), no-run REASON"
            )


def _is_below_the_working_folder(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _commands(block: Block, *, background: bool, exit_code: int) -> list[Step]:
    found = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    if found[0].strip() or len(found) == 1:
        raise BadSnippet(f"line {block.line}: a console block that runs must begin with `$ ` and a command")
    commands: list[Step] = []
    line = block.line + 1 + found[0].count("\n")
    for text in found[1:]:
        command, _, output = text.replace("\\\n", "").partition("\n")
        commands.append(
            Command(line=line, command=command, output=output, background=background, exit_code=exit_code)
        )
        line += text.count("\n")
    return commands
