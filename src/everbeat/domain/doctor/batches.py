"""The check of batches: whether a program forgot to seal one."""

from __future__ import annotations

from everbeat.domain.batch import ForgottenBatches
from everbeat.domain.doctor.findings import Check, CheckCode
from everbeat.errors.wording import amount


def judge_batches(found: ForgottenBatches | None) -> Check:
    """Judge whether all batches were sealed within a day. An open batch never ends."""
    if found is None:
        return CheckCode.BATCHES.ok("no batch has been open for more than a day")
    return CheckCode.BATCHES.warn(
        f"{amount(found.number, 'batch has', plural='batches have')} been open for more than a day, first {found.name!r} ({found.first}),"
        " so the callbacks wait",
        f"seal them if they are complete: everbeat batches seal {found.first}, or cancel them: everbeat batches cancel {found.first}.",
    )
