"""Overdue steps of workflows: shown first, and carried out if an operator confirms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everbeat.domain.workflow.states import STUCK, StuckWorkflow
from everbeat.errors.wording import amount
from everbeat.web.noting import noted
from everbeat.web.page import ActionDone, Page, PageResult, Visit

_MOST_SHOWN: Final = 200
_MOST_NAMED: Final = 20


async def dry_run(visit: Visit) -> PageResult:
    """Return the steps of workflows that are overdue. Nothing is changed."""
    found = await visit.part("The overdue steps", visit.app.arecover_stuck_workflows(dry_run=True), None)
    return Page(
        template="workflows_reconcile.html",
        title="Reconcile, dry run",
        says=_sentence(found),
        data={"stuck": found},
        more={
            "words": STUCK,
            "most_shown": _MOST_SHOWN,
            "can_repair": any(each.problem is None for each in found or ()),
        },
        command="everbeat workflows reconcile --dry-run",
    )


def _sentence(found: Sequence[StuckWorkflow] | None) -> str:
    if found is None:
        return "The overdue steps could not be read"
    if not found:
        return "No step of a workflow is overdue"
    workflows = amount(len({each.workflow_id for each in found}), "workflow")
    return f"{amount(len(found), 'step')} of {workflows} {'is' if len(found) == 1 else 'are'} overdue"


async def reconcile(visit: Visit) -> PageResult:
    """Carry out the overdue steps, as each supervisor does by itself, and note how many were."""
    found = await visit.app.arecover_stuck_workflows()
    done = [each for each in found if each.problem is None]
    if done:
        ids = dict.fromkeys(str(each.workflow_id) for each in done)
        await noted(visit, "reconcile_workflows", target=", ".join([*ids][:_MOST_NAMED]), affected=len(done))
    says = f"Carried out {amount(len(done), 'step')}."
    if rest := len(found) - len(done):
        says += f" {amount(rest, 'step')} could not be carried out; this page says why."
    goto = "/workflows/reconcile" if rest else "/workflows"
    return ActionDone(goto=visit.link(goto), says=says, data={"stuck": found})
