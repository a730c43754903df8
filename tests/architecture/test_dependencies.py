"""Test that every imported distribution is declared as a dependency or in the extra of the importing code."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions

from tests.architecture.source_tree import PACKAGE, ROOT, modules, nodes

EXTRAS = {"nats/": "nats", "otel/": "otel", "sentry/": "sentry", "web/": "web"}
"""The code below these folders runs only where the extra is installed."""


def test_every_imported_distribution_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    always = names(project["dependencies"])
    extras = {extra: names(project["optional-dependencies"][extra]) for extra in EXTRAS.values()}
    distributions = packages_distributions()
    undeclared = set()
    for module in modules(PACKAGE):
        declared = always.union(
            *(extras[extra] for folder, extra in EXTRAS.items() if module.name.startswith(folder))
        )
        for package in imported_packages(module.tree):
            if not {normal(name) for name in distributions.get(package, [package])} & declared:
                undeclared.add((package, module.name))
    assert sorted(undeclared) == []


def imported_packages(tree: ast.AST) -> set[str]:
    found = set()
    for node in nodes(tree):
        match node:
            case ast.Import():
                found |= {alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom(module=str(name), level=0):
                found.add(name.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"everbeat"}


def names(requirements: Iterable[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]) for requirement in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
