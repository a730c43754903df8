"""Each file, folder and dotted name of everbeat that documents, docstrings and comments mention exists."""

import ast
import importlib
import importlib.util
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat.domain.tracing import names

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "everbeat"
PLACES = (ROOT, ROOT / "src", ROOT / "tests", SOURCE, SOURCE / "sql")
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
CODE = re.compile(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py|\.sql)?)`")
FILE = re.compile(r"(?<![\w./<$-])((?:[\w-]+/)+[\w-]+\.(?:py|sql|md))\b")
MEMBER = re.compile(r"`(\w+)` in `([\w/]+\.py)`")
DOTTED = re.compile(r"(?<![\w./@-])everbeat(?:\.[A-Za-z_]\w*)+")
PLACEHOLDERS = {
    *(
        "domain/x",
        "sql/x",
        "store/x",
        "store/x.py",
        "cli/x",
        "cli/x.py",
    ),  # the parts of a feature, in CONTRIBUTING.md
    "path/to/file.py",
    "asyncio/windows_events.py",  # of Python itself
    "child/node",  # how a nested node is named
    "tests/chaos/failed/",  # made by a run that fails
}
PLANNED = {
    "everbeat/_top_level.py",
    *(f"everbeat.{name}" for name in ("django", "inspection", "middleware", "recovery", "web")),
}
"""Agreed in docs/decisions.md, and not built yet."""
ATTRIBUTES = {
    text.removesuffix(" {}").removesuffix(".")
    for text in vars(names).values()
    if isinstance(text, str) and text.startswith("everbeat.") and text != names.__name__
}
"""The attributes, spans and events of tracing, whose names look like those of modules."""


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_and_name_that_a_document_mentions_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [*missing_files(text, CODE, FILE), *missing_members(text), *missing_names(text)] == []


@pytest.mark.parametrize(
    "package", sorted({path.parent for path in SOURCE.rglob("*.py")}), ids=lambda path: path.name
)
def test_every_file_and_name_that_a_docstring_or_comment_mentions_exists(package: Path) -> None:
    wrong = []
    for path in sorted(package.glob("*.py")):
        text = "\n".join(prose_of(path))
        wrong += [f"{path.name}: {name}" for name in (*missing_files(text, FILE), *missing_names(text))]
    assert wrong == []


def test_every_file_that_a_comment_of_a_statement_mentions_exists() -> None:
    wrong = []
    for path in sorted((SOURCE / "sql").rglob("*.sql")):
        comments = "\n".join(re.findall(r"--.*", path.read_text(encoding="utf-8")))
        wrong += [f"{path.name}: {name}" for name in missing_files(comments, FILE)]
    assert wrong == []


def missing_files(text: str, *patterns: re.Pattern[str]) -> list[str]:
    named = {name for pattern in patterns for name in pattern.findall(text)} - PLACEHOLDERS - PLANNED
    return sorted(name for name in named if not any(is_there(place / name) for place in PLACES))


def missing_members(text: str) -> list[str]:
    """Each "`name` in `file.py`" that the file does not define."""
    return [
        f"{name} in {file}"
        for name, file in MEMBER.findall(text)
        if not any(
            re.search(
                rf"^ *(?:(?:async )?def |class )?{name}\b",
                (place / file).read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            for place in PLACES
            if (place / file).exists()
        )
    ]


def is_there(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.sql").exists()


def missing_names(text: str) -> list[str]:
    found = set(DOTTED.findall(text)) - PLANNED - ATTRIBUTES
    return sorted(name for name in found if not is_known(name))


def is_known(name: str) -> bool:
    """A module, a name in a module, a member of a class there, or a table in the schema `everbeat`."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if is_module(module):
            found: object = importlib.import_module(module) if length < len(parts) else None
            for part in parts[length:]:
                if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
                    return parts[1] in tables()
                found = getattr(found, part, None)
            return True
    return False


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def tables() -> set[str]:
    statements = "".join(
        path.read_text(encoding="utf-8") for path in (SOURCE / "sql" / "schema").rglob("*.sql")
    )
    return set(re.findall(r"create (?:table|view) (?:if not exists )?\{schema\}\.(\w+)", statements))


def prose_of(path: Path) -> Iterator[str]:
    """The comments and docstrings of a module."""
    with path.open("rb") as source:
        yield from (
            token.string for token in tokenize.tokenize(source.readline) if token.type == tokenize.COMMENT
        )
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def test_a_mention_of_a_file_or_name_that_does_not_exist_is_found() -> None:
    text = "`worker/nothing.py`, everbeat.worker.nothing, see docs/nothing.md; `worker/claim/`, everbeat.inspection.TaskInfo.state"
    assert missing_files(text, CODE, FILE) == ["docs/nothing.md", "worker/nothing.py"]
    assert missing_names(text) == ["everbeat.worker.nothing"]
    assert missing_members("`App` in `app.py`, `Ap` in `app.py`") == ["Ap in app.py"]
