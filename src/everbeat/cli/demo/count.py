"""What is counted in a Python file, and a program that counts many files, one after the other, without any queue.

What lives here: pure counting with the standard library alone, so that `python -I count.py` runs without everbeat. What
may not: anything that knows of tasks.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import threading
import tokenize
import warnings
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Final

# In Python 3.11 and 3.12 two threads that parse at once spoil each other's count of the depth: one of them gets a SystemError.
_one_parses: Final = threading.Lock()

_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one file or the sums of many.

    A line with any token but a comment is a code line (docstrings are code), one with nothing but a comment a comment
    line, one without anything a blank line. Files that cannot be read, decoded or parsed are counted as that, and
    nothing in them but their bytes.
    """

    files: int = 0
    unreadable: int = 0
    undecodable: int = 0
    unparsable: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    blank_lines: int = 0
    functions: int = 0
    classes: int = 0
    imports: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        """The sums, field by field."""
        sums = (mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        return Counts(**dict(zip(self.__slots__, sums, strict=True)))

    @property
    def lines(self) -> int:
        """All lines."""
        return self.code_lines + self.comment_lines + self.blank_lines


def total(counts: Iterable[Counts]) -> Counts:
    """The sums of many."""
    return sum(counts, Counts())


def count_file(path: str) -> Counts:
    """Counts one file."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path is text all the way from the task's arguments
            source = file.read()
    except OSError:
        return Counts(files=1, unreadable=1)
    return count_source(source)


def count_source(source: bytes) -> Counts:
    """Counts the text of one file, decoded as Python would decode it."""
    try:
        text = _decoded(source)
    except (SyntaxError, UnicodeError, LookupError):
        return Counts(files=1, undecodable=1, bytes=len(source))
    try:
        code, comments, lines = _lines(text)
        functions, classes, imports = _definitions(text)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError):
        # The parser reports NUL bytes as ValueError, and nesting beyond its stack as one of the last two.
        return Counts(files=1, unparsable=1, bytes=len(source))
    return Counts(
        files=1,
        code_lines=code,
        comment_lines=comments,
        blank_lines=lines - code - comments,
        functions=functions,
        classes=classes,
        imports=imports,
        bytes=len(source),
    )


def _decoded(source: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    # Line ends become \n, as Python's own reading of source does; a plain decode would keep \r.
    return io.TextIOWrapper(io.BytesIO(source), encoding=encoding).read()


def _lines(text: str) -> tuple[int, int, int]:
    """The numbers of code lines, comment lines and all lines."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    # A line that holds only a backslash has no token of its own, and is part of a statement all the same.
    code.update(
        number for number, line in enumerate(lines, 1) if line.strip() == "\\" and number not in comments
    )
    return len(code), len(comments - code), len(lines)


def _definitions(text: str) -> tuple[int, int, int]:
    """The numbers of functions (methods and nested ones too), classes and import statements."""
    functions = classes = imports = 0
    with _one_parses:
        tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions += 1
            case ast.ClassDef():
                classes += 1
            case ast.Import() | ast.ImportFrom():
                imports += 1
            case _:
                pass
    return functions, classes, imports


def main() -> None:
    """Reads NUL-separated paths from stdin, counts the files one by one, and writes their counts as JSON by path."""
    warnings.simplefilter("ignore")  # invalid escapes in foreign code are not ours to report
    os.nice(4)  # the workers go first
    paths = [os.fsdecode(path) for path in sys.stdin.buffer.read().split(b"\0") if path]
    print(json.dumps({path: asdict(count_file(path)) for path in paths}))


if __name__ == "__main__":
    main()
