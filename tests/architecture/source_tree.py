"""Parse source files and list the project's files for the architecture tests."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from everbeat.runtime.loading import no_collection

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "everbeat"
PROJECT_FOLDERS = [".ci", "benchmarks", "docs", "src", "tests"]
PROJECT_FILES = [ROOT / name for name in (".gitignore", "LICENSE", "Makefile", "pyproject.toml")]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed Python file; `name` is its path below the folder it was read from, with forward slashes."""

    name: str
    text: str
    tree: ast.Module


def parse(name: str, text: str) -> Module:
    return Module(name=name, text=text, tree=ast.parse(text, filename=name))


@cache
def modules(folder: Path) -> list[Module]:
    """Parse all files of a folder. The trees stay, so the garbage collector would only visit millions of nodes again and again."""
    paths = sorted(folder.rglob("*.py"))
    with no_collection():
        return [
            parse(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")) for path in paths
        ]


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree, walked once for all rules."""
    return list(ast.walk(tree))


@cache
def functions(tree: ast.AST) -> list[FunctionNode]:
    return [node for node in nodes(tree) if isinstance(node, FunctionNode)]


def project_files() -> list[Path]:
    """Return every file of the project; untracked files in the top folder do not belong to it."""
    below = [path for folder in PROJECT_FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(
        path for path in [*below, *ROOT.glob("*.md"), *PROJECT_FILES] if path.is_file() and _kept(path)
    )


def _kept(path: Path) -> bool:
    inner = path.relative_to(ROOT).parts[1:]
    return not any(part.startswith(".") or part == "__pycache__" for part in inner)
