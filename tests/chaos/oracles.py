"""The list of all oracles. Each oracle yields the breaches of one promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from tests.chaos.evidence import Breach, Evidence
from tests.chaos.message_oracles import MESSAGE_ORACLES
from tests.chaos.task_oracles import TASK_ORACLES
from tests.chaos.tree_oracles import TREE_ORACLES
from tests.chaos.workflow_oracles import WORKFLOW_ORACLES

Oracle: TypeAlias = Callable[[Evidence], Iterator[Breach]]

ORACLES: Final[tuple[Oracle, ...]] = (*TASK_ORACLES, *TREE_ORACLES, *WORKFLOW_ORACLES, *MESSAGE_ORACLES)


def breaches(evidence: Evidence) -> list[Breach]:
    """Return the breaches that all oracles find in the evidence."""
    return [breach for oracle in ORACLES for breach in oracle(evidence)]
