"""Test that no class and no type alias is defined in two modules of the package."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.architecture.source_tree import PACKAGE, Module, modules

ALLOWED = {
    "DatabaseUnreachable": "an error, and the event whose name in the log follows from its class",
}


def test_no_type_name_is_defined_in_two_modules() -> None:
    defined = defaultdict(list)
    for module in modules(PACKAGE):
        for name in type_names(module):
            defined[name].append(module.name)
    several = {name: places for name, places in defined.items() if len(places) > 1 and name not in ALLOWED}
    assert several == {}


def test_every_allowed_duplicate_type_name_is_still_duplicated() -> None:
    names = [name for module in modules(PACKAGE) for name in type_names(module)]
    assert [name for name in ALLOWED if names.count(name) < 2] == []


def test_the_name_check_finds_classes_and_type_aliases() -> None:
    source = "class Lease: ...\nPlan = dict[str, int]\nT = TypeVar('T')\n_Private = list[int]\nRun: TypeAlias = int\n"
    assert [*names_in(ast.parse(source))] == ["Lease", "Plan", "Run"]


def type_names(module: Module) -> Iterator[str]:
    yield from names_in(module.tree)


def names_in(tree: ast.Module) -> Iterator[str]:
    """Return the public classes and type aliases that a module defines, without type variables."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()) if name[
                0
            ].isupper():
                pass
            case _:
                continue
        if not name.startswith("_") and not name.isupper():
            yield name
