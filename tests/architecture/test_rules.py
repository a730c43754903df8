"""Test that the source keeps the rules, and that each rule finds a planted violation."""

from collections.abc import Callable, Iterator
from textwrap import dedent

import pytest

from tests.architecture import rules
from tests.architecture.source_tree import PACKAGE, ROOT, Module, modules, parse

Rule = Callable[[Module], Iterator[str]]

EVERYWHERE = [
    rules.imports_in_functions,
    rules.ambient_clock_and_dice,
    rules.stray_tasks,
    rules.unbounded_sessions,
    rules.unguarded_output,
    rules.too_long,
    rules.attic_names,
]
IN_TESTS = [rules.tests_without_assertion, rules.sleeps_without_reason, rules.attic_names]

# Files, or folders with their slash, that are exempt from a rule, with the reason.
ALLOWED: dict[Rule, dict[str, str]] = {
    rules.ambient_clock_and_dice: {"runtime/": "the room of the clock"},
    rules.stray_tasks: {
        "runtime/": "the room that holds tasks",
        "testing/clock.py": "cancels its only task before it returns",
    },
    rules.imports_in_functions: {},
    rules.unbounded_sessions: {
        "store/target.py": "makes every connection and every transaction",
        "store/user_connection/drivers.py": "a transaction on the user's own connection",
    },
}

PLANTED: list[tuple[Rule, str, str]] = [
    (rules.imports_in_functions, "app.py", "def load():\n    import typer"),
    (rules.imports_in_functions, "app.py", "async def load():\n    if True:\n        from os import path"),
    (rules.ambient_clock_and_dice, "app.py", "from datetime import datetime\nnow = datetime.now()"),
    (rules.ambient_clock_and_dice, "app.py", "import datetime as d\nnow = d.datetime.utcnow"),
    (
        rules.ambient_clock_and_dice,
        "app.py",
        "from dataclasses import field\nfrom time import time\nfield(default_factory=time)",
    ),
    (rules.ambient_clock_and_dice, "app.py", "import random\nrandom.uniform(0, 1)"),
    (rules.ambient_clock_and_dice, "app.py", "from random import shuffle\nshuffle([])"),
    (rules.stray_tasks, "app.py", "import asyncio\nasyncio.create_task(work())"),
    (rules.stray_tasks, "app.py", "from asyncio import ensure_future as later\nlater(work())"),
    (rules.stray_tasks, "app.py", "import asyncio\nasyncio.get_running_loop().create_task(work())"),
    (rules.stray_tasks, "app.py", "self._loop.create_task(work())"),
    (rules.unbounded_sessions, "app.py", "async def f():\n    async with connection.transaction(): pass"),
    (rules.unbounded_sessions, "app.py", "with psycopg.connect(url) as connection: pass"),
    (rules.unguarded_output, "cli/app.py", "from rich.console import Console\nConsole().print('a')"),
    (rules.unguarded_output, "cli/app.py", "import sys\nsys.stdout.buffer.write(b'a')"),
    (rules.too_long, "app.py", "x = 1\n" * (rules.MAX_FILE_LINES + 1)),
    (rules.too_long, "app.py", "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES),
    (rules.attic_names, "store/utils.py", ""),
    (rules.attic_names, "helpers/__init__.py", ""),
    (rules.internals_in_benchmarks, "queues.py", "from everbeat.cli.output import say"),
    (rules.internals_in_benchmarks, "queues.py", "import everbeat.store.target"),
    (rules.internals_in_benchmarks, "queues.py", "from everbeat import cli"),
    (rules.tests_without_assertion, "test_x.py", "def test_nothing():\n    work()"),
    (rules.sleeps_without_reason, "test_x.py", "import time\ntime.sleep(1)"),  # the offence itself
]

HARMLESS: list[tuple[Rule, str]] = [
    (rules.imports_in_functions, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os"),
    (
        rules.ambient_clock_and_dice,
        "from random import Random\ndef f(random: Random): return random.uniform(0, 1)",
    ),
    (
        rules.ambient_clock_and_dice,
        "import random\nfrom time import monotonic\nr = random.Random(1); monotonic()",
    ),
    (rules.stray_tasks, "async with TaskGroup() as group:\n    group.create_task(work())"),
    (rules.unbounded_sessions, "with target.connect('a') as c, transaction(c): pass"),
    (rules.too_long, "x = 1\n" * rules.MAX_FILE_LINES),
    (
        rules.internals_in_benchmarks,
        "import everbeat\nfrom everbeat import App, errors\nfrom everbeat.bench.sampling import Sample\nfrom everbeat.errors import TaskFailed",
    ),
    (rules.tests_without_assertion, "def test_a():\n    with pytest.raises(ValueError):\n        work()"),
    (rules.tests_without_assertion, "def test_a():\n    assert_sound(work())"),
    (rules.sleeps_without_reason, "import time\ntime.sleep(1)  # the frozen process must miss a beat"),
    (rules.sleeps_without_reason, "import asyncio\n# Nothing may happen now.\nawait asyncio.sleep(1)"),
]


def _name(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("rule", EVERYWHERE, ids=_name)
def test_the_source_code_keeps_each_rule(rule: Rule) -> None:
    allowed = tuple(ALLOWED.get(rule, {}))
    found = [
        violation
        for module in modules(PACKAGE)
        if not module.name.startswith(allowed)
        for violation in rule(module)
    ]
    assert not found, "\n".join(found)


def test_the_comparisons_import_only_public_names_and_parts_of_the_bench() -> None:
    found = [
        violation
        for module in modules(ROOT / "benchmarks")
        for violation in rules.internals_in_benchmarks(module)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", IN_TESTS, ids=_name)
def test_the_tests_keep_each_rule(rule: Rule) -> None:
    tests = [module for module in modules(ROOT / "tests") if "/programs/" not in module.name]
    found = [violation for module in tests for violation in rule(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "name", "code"), PLANTED, ids=_name)
def test_each_rule_finds_a_planted_violation(rule: Rule, name: str, code: str) -> None:
    assert len(list(rule(parse(name, dedent(code))))) == 1


@pytest.mark.parametrize(("rule", "code"), HARMLESS, ids=_name)
def test_each_rule_accepts_harmless_code(rule: Rule, code: str) -> None:
    assert list(rule(parse("app.py", code))) == []


def test_every_file_with_an_exemption_from_a_rule_exists() -> None:
    stale = [place for places in ALLOWED.values() for place in places if not (PACKAGE / place).exists()]
    assert not stale
