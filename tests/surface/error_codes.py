"""Record every error with its class, its bases, its code and the exit code, and the codes of other results."""

from __future__ import annotations

from collections.abc import Iterator

import everbeat
from everbeat import errors
from everbeat.cli.failures import MEANINGS, exit_code_of
from everbeat.domain.doctor.findings import CheckCode, CheckVerdict
from everbeat.domain.workflow.states import STUCK, WorkflowCode
from everbeat.errors import EverbeatError, WorkerRefused
from everbeat.errors.tasks import BUILT_IN_CODES
from everbeat.inspection import ReasonCode
from tests.surface.source import subclasses


def text() -> str:
    """Return the tables one below the other."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "exit codes:"
    yield from (f"  {int(code)} {code.name}: {meaning}" for code, meaning in MEANINGS.items())
    yield "\nclasses: Class(bases) CODE, exit code, where programs import it from"
    known = {EverbeatError, *subclasses(EverbeatError), *_exceptions()}
    yield from (f"  {_error(each)}" for each in sorted(known, key=lambda each: each.__name__))
    for title, codes in {
        "codes of failed tasks": sorted(BUILT_IN_CODES),
        "codes of workflows and nodes": [code.value for code in WorkflowCode],
        "codes of stuck workflows": [*STUCK],
        "checks of doctor": [code.value for code in CheckCode],
        "verdicts of doctor": [code.value for code in CheckVerdict],
        "reasons of explain": [code.value for code in ReasonCode],
    }.items():
        yield f"\n{title}:"
        yield from (f"  {code}" for code in codes)


def _exceptions() -> set[type[BaseException]]:
    public = [getattr(everbeat, name) for name in everbeat.__all__]
    return {each for each in public if isinstance(each, type) and issubclass(each, BaseException)}


def _error(kind: type[BaseException]) -> str:
    bases = ", ".join(base.__name__ for base in kind.__bases__)
    said = f"{kind.__name__}({bases})"
    if issubclass(kind, EverbeatError):
        exit_code = "that of its reason" if kind is WorkerRefused else int(exit_code_of(kind.__new__(kind)))
        said += f" {kind.code}, {exit_code}"
    homes = [home.__name__ for home in (everbeat, errors) if getattr(home, kind.__name__, None) is kind]
    return f"{said}, {' and '.join(homes) or 'internal'}"
