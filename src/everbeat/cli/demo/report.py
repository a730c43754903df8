"""The end of the demo: one JSON document for programs, a verdict in words for people.

What lives here: their shapes. What may not: the judgement itself.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everbeat.cli.demo.evidence import Evidence
from everbeat.cli.demo.plan import Blow
from everbeat.cli.demo.verdict import Rescue, StrikeResult, Verdict

_DEEDS: Final = {
    Blow.KILL_WORKER: "kill -9 of one worker process",
    Blow.FREEZE_TREE: "SIGSTOP of a whole tree, SIGCONT later",
    Blow.KILL_TREE: "kill -9 of a whole tree",
}


def document(evidence: Evidence, verdict: Verdict) -> dict[str, Any]:
    """Everything, as JSON can hold it; times are in seconds."""
    return {
        "ok": verdict.ok,
        "tasks": len(evidence.files),
        "completed": verdict.completed,
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "totals_match": verdict.totals_match,
        "took_s": round(evidence.took_s, 3),
        "path": str(evidence.folder),
        "files": {"found": evidence.found, "chosen": len(evidence.paths)},
        "totals": asdict(verdict.totals),
        "independent_totals": None if evidence.independent is None else asdict(evidence.independent),
        "kills": [_kill(result) for result in verdict.strikes],
        "recoveries": [_recovery(rescue) for rescue in verdict.rescues],
        "nats": None if evidence.messages is None else asdict(evidence.messages),
        "promises": [asdict(promise) for promise in verdict.promises],
    }


def _kill(result: StrikeResult) -> dict[str, Any]:
    strike = result.strike
    return {
        "what": strike.act.blow.value,
        "tree": strike.tree,
        "pid": strike.pid,
        "worker_ids": sorted(strike.worker_ids),
        "at_s": _rounded(strike.at_s),
        "tasks_held": len(strike.held),
        "recovered": len(result.rescues),
        "noticed_by": result.noticed_by,
        "noticed_after_s": _rounded(result.noticed_after_s),
        "settled_after_s": _rounded(result.settled_after_s),
        "promised_within_s": strike.act.within_s,
        "rerun_after_s": _rounded(result.rerun_after_s),
        "thawed_after_s": _rounded(strike.thawed_after_s),
        "late_attempts_refused": strike.refused,
    }


def _recovery(rescue: Rescue) -> dict[str, Any]:
    return {
        "task_id": str(rescue.task_id),
        "path": rescue.path,
        "task": rescue.task,
        "kill": rescue.blow,
        "worker_id": rescue.worker_id,
        "was": rescue.was,
        "cause": rescue.cause,
        "noticed_by": rescue.noticed_by,
        "action": rescue.action,
        "noticed_after_s": _rounded(rescue.noticed_after_s),
        "rerun_after_s": _rounded(rescue.rerun_after_s),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def show_verdict(console: Console, evidence: Evidence, verdict: Verdict) -> None:
    """The verdict in words."""
    totals = verdict.totals
    of_how_many = "" if evidence.found == len(evidence.paths) else f" of {evidence.found:,}"
    odd = [
        f"{number} {what}"
        for number, what in (
            (totals.unreadable, "unreadable"),
            (totals.undecodable, "undecodable"),
            (totals.unparsable, "unparsable"),
        )
        if number
    ]
    summary = Text(
        f"{len(evidence.paths):,}{of_how_many} files of {evidence.folder}{' (' + ', '.join(odd) + ')' if odd else ''}:"
        f" {totals.code_lines:,} lines of code, {totals.comment_lines:,} of comment, {totals.blank_lines:,} blank,"
        f" {totals.functions:,} functions, {totals.classes:,} classes, {totals.imports:,} imports"
        f" in {evidence.took_s:.1f} s."
    )
    title = "every promise held" if verdict.ok else "a promise was broken"
    parts = Group(summary, Text(), _blows(verdict), Text(), _promises(verdict))
    console.print(Panel(parts, title=title, border_style="green" if verdict.ok else "red", padding=(1, 2)))


def _blows(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("WHAT", "HELD", "RESCUED", "NOTICED BY", "IN OTHER HANDS", "RUNNING AGAIN"):
        table.add_column(name, justify="left" if name in ("WHAT", "NOTICED BY") else "right")
    for result in verdict.strikes:
        table.add_row(
            _DEEDS[result.strike.act.blow],
            str(len(result.strike.held)),
            str(len(result.rescues)),
            result.noticed_by or "nobody",
            _after(result.settled_after_s),
            _after(result.rerun_after_s),
        )
    return table


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.2f} s"


def _promises(verdict: Verdict) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for promise in verdict.promises:
        mark = Text("held", style="green") if promise.held else Text("BROKEN", style="bold red")
        table.add_row(mark, promise.words, Text(promise.seen, style="dim"))
    return table
