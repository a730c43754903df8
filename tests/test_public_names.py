"""The public names: each can be had, and what is loaded late is what type checkers see."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import everbeat


def test_every_public_name_can_be_had() -> None:
    for name in everbeat.__all__:
        assert getattr(everbeat, name) is not None
    assert set(everbeat.__all__) <= set(dir(everbeat))


def test_type_checkers_see_what_is_loaded_late() -> None:
    tree = ast.parse(Path(everbeat.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(declared) == set(everbeat.__all__)
    for name, room in declared.items():
        assert getattr(everbeat, name) is getattr(import_module(str(room)), name)


def test_an_unknown_name_is_refused_as_usual() -> None:
    with pytest.raises(AttributeError, match="Aap"):
        getattr(everbeat, "Aap")  # noqa: B009 - a type checker would refuse the plain form
    with pytest.raises(ImportError):
        exec("from everbeat import Aap")
