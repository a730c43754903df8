"""The system page: the checks of `everbeat doctor`, the worst first."""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec import structs

from everbeat import __version__
from everbeat.domain.doctor.findings import CheckCode, CheckVerdict
from everbeat.errors.wording import amount
from everbeat.web.database_problems import may_see_address, without_address
from everbeat.web.examination import Examined
from everbeat.web.page import Goto, Page, PageResult, Visit

_REFRESH_S: Final = 2
_ORDER: Final = (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.OK)


async def show(visit: Visit) -> PageResult:
    """Return the latest checks. If they are old, others run in the background, and the page loads itself again."""
    found = visit.web.examiner.look()
    sees_address = may_see_address(visit.user)
    if not sees_address:
        found = _without_address(found)
    worst = max((check.verdict for check in found.checks), key=list(CheckVerdict).index, default=None)
    checks = sorted(found.checks, key=lambda check: _ORDER.index(check.verdict))
    data = {
        "verdict": worst,
        "checks": checks,
        "at": found.at,
        "is_running": found.is_running,
        "problem": found.problem,
    }
    return Page(
        template="system.html",
        title="System",
        says=_sentence(found),
        data=data,
        more={
            "version": __version__,
            "target": visit.web.access.address.shown if sees_address else "a hidden database",
            "schema": visit.app.schema,
        },
        command="everbeat doctor",
        refresh_s=_REFRESH_S if found.is_running else None,
    )


def _without_address(found: Examined) -> Examined:
    checks = [
        structs.replace(check, text="it cannot be used; the log of the dashboard names the cause", fix=None)
        if check.code is CheckCode.DATABASE and check.verdict is CheckVerdict.FAIL
        else structs.replace(
            check,
            text=without_address(check.text),
            fix=None if check.fix is None else without_address(check.fix),
        )
        for check in found.checks
    ]
    problem = None if found.problem is None else "The log of the dashboard names the cause."
    return structs.replace(found, checks=checks, problem=problem)


def _sentence(found: Examined) -> str:
    if found.problem is not None:
        return "The checks could not run"
    if found.at is None:
        return "The first checks are running"
    counts = Counter(check.verdict for check in found.checks)
    failed, warned = counts[CheckVerdict.FAIL], counts[CheckVerdict.WARN]
    if failed:
        rest = f", and {amount(warned, 'warning')}" if warned else ""
        return f"{amount(failed, 'check')} failed{rest}"
    if warned:
        verb = "needs" if warned == 1 else "need"
        return f"Nothing is broken; {amount(warned, 'finding')} {verb} a look"
    return f"All {len(found.checks)} checks are fine"


async def examine(visit: Visit) -> PageResult:
    """Run the checks again."""
    visit.web.examiner.look(again=True)
    return Goto(visit.link("/system"))
