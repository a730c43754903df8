"""Choose the Python files that the demo works on, and analyze their contents.

As a program, without everbeat: read NUL-separated paths from stdin and print their counts as JSON by path.
"""

from __future__ import annotations

import ast
import io
import json
import os
import stat
import subprocess
import sys
import sysconfig
import threading
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Final

MOST_FILES: Final = 400
FEWEST_FILES: Final = 3
LARGEST_BYTES: Final = 1 << 20

_NOT_SOURCE: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test"})
_GIT_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """The absolute paths of the files chosen below `folder`, in order. `found` is the number of files found there."""

    folder: Path
    found: int
    chosen: tuple[str, ...]


def choose(folder: Path | None) -> SourceFiles:
    """Return the Python files below `folder`, as listed by git in a checkout. None means the standard library without its tests.

    If there are more than MOST_FILES files, an even sample is returned, which is the same each time. Files above 1 MiB, names that are not
    UTF-8, and everything except regular files are left out.
    """
    if folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = list(_walk(root, leave_out=_NOT_SOURCE | _NOT_LIBRARY))
    else:
        root = folder.absolute()
        paths = _listed_by_git(root) or list(_walk(root, leave_out=_NOT_SOURCE))
    fitting = sorted({path for path in paths if _fits(path)})
    return SourceFiles(folder=root, found=len(fitting), chosen=tuple(_sample(fitting, most=MOST_FILES)))


def _walk(root: Path, *, leave_out: frozenset[str]) -> Iterator[str]:
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name not in leave_out and not name.startswith("."))
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))  # noqa: PTH118 - 10,000 of them


def _listed_by_git(root: Path) -> list[str]:
    """Return the files that git would commit, or an empty list if git or the checkout is missing."""
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"]
    command = ["git", "-C", str(root), *listing]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=_GIT_PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    names = asked.stdout.split(b"\0") if asked.returncode == 0 else []
    return [str(root / os.fsdecode(name)) for name in names if name]


def _fits(path: str) -> bool:
    try:
        path.encode()
        found = os.stat(path)  # noqa: PTH116 - 10,000 of them
    except (OSError, UnicodeError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST_BYTES


def _sample(paths: Sequence[str], *, most: int) -> Sequence[str]:
    if len(paths) <= most:
        return paths
    return [paths[place * len(paths) // most] for place in range(most)]


# In Python 3.11 and 3.12, threads that parse at the same time share the depth counter, so one of them can get a SystemError.
_parsing: Final = threading.Lock()

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
    """The counts for one file, or the sums over many files.

    A line with any token other than a comment is a code line (docstrings are code). A line with only a comment is a comment line, and an
    empty line is a blank line. If a file cannot be read, decoded or parsed, only its bytes are counted.
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
        """Return the sums, field by field."""
        sums = (mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        return Counts(**dict(zip(self.__slots__, sums, strict=True)))

    @property
    def lines(self) -> int:
        """Return the total number of lines."""
        return self.code_lines + self.comment_lines + self.blank_lines


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sums of many counts."""
    return sum(counts, Counts())


def count_file(path: str) -> Counts:
    """Return the counts for one file."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path is text all the way from the task's arguments
            source = file.read()
    except OSError:
        return Counts(files=1, unreadable=1)
    return count_source(source)


def count_source(source: bytes) -> Counts:
    """Return the counts for the text of one file, decoded as Python decodes it."""
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
    # This converts line ends to \n, as Python does when it reads source. decode() would keep \r.
    return io.TextIOWrapper(io.BytesIO(source), encoding=encoding).read()


def _lines(text: str) -> tuple[int, int, int]:
    """Return the numbers of code lines, comment lines and all lines."""
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
    # A line that contains only a backslash has no token, but is part of a statement.
    code.update(
        number for number, line in enumerate(lines, 1) if line.strip() == "\\" and number not in comments
    )
    return len(code), len(comments - code), len(lines)


def _definitions(text: str) -> tuple[int, int, int]:
    """Return the numbers of functions (including methods and nested functions), classes and import statements."""
    functions = classes = imports = 0
    with _parsing:
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
    """Count the files named on stdin one by one, and print their counts."""
    warnings.simplefilter("ignore")  # invalid escapes in the counted code are not the demo's problem
    os.nice(4)  # the workers have priority
    paths = [os.fsdecode(path) for path in sys.stdin.buffer.read().split(b"\0") if path]
    print(json.dumps({path: asdict(count_file(path)) for path in paths}))


if __name__ == "__main__":
    main()
