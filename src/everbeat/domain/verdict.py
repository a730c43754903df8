"""How a workflow ends when nothing is left to wait for.

What lives here: the rule. What may not: asking what its nodes came to (`store.workflows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct

WORKFLOW_SUCCESS_CASE_NOT_MET: Final = "WORKFLOW_SUCCESS_CASE_NOT_MET"
"""No case of the success policy was met, though none of the nodes it needs failed: they were skipped."""

FinalState: TypeAlias = Literal["COMPLETED", "FAILED", "CANCELLED"]


class Ended(Struct, frozen=True, kw_only=True):
    """A workflow without open nodes. `bad_*`: its first node, by number, that ended otherwise than well; `short`: with a success policy,
    the numbers of all that did not complete."""

    workflow_id: UUID
    state: str
    on_error: str
    success: Sequence[Sequence[int]] = ()
    output: int | None = None
    output_state: str | None = None
    output_result: str | None = None
    output_is_map: bool = False
    bad_name: str | None = None
    bad_state: str | None = None
    bad_error: str | None = None
    short: Sequence[int] = ()
    output_name: str | None = None
    output_error: str | None = None


class Verdict(Struct, frozen=True):
    """The final state; `result` and `error` are JSON text."""

    workflow_id: UUID
    state: FinalState
    result: str | None = None
    error: str | None = None


def verdict(ended: Ended) -> Verdict:
    """A cancelled workflow is CANCELLED whatever its nodes did. With a success policy it is COMPLETED when any case is met; otherwise when no
    node failed, or failures were to be passed over (`on_error="continue"`). One that completes without its output says why it has none."""
    if ended.state == "CANCELLING":
        return Verdict(ended.workflow_id, "CANCELLED")
    if ended.success:
        short = frozenset(ended.short)
        is_met = any(short.isdisjoint(case) for case in ended.success)
    else:
        is_met = ended.bad_name is None or ended.on_error == "continue"
    if is_met:
        if ended.output is None or ended.output_result is not None:
            return Verdict(ended.workflow_id, "COMPLETED", result=ended.output_result)
        error = _of_node(ended.output_name, ended.output_state, ended.output_error)
        return Verdict(ended.workflow_id, "COMPLETED", error=_encoded(error))
    return Verdict(ended.workflow_id, "FAILED", error=_error(ended))


def _error(ended: Ended) -> str:
    if ended.bad_name is None:
        error: dict[str, object] = {
            "code": WORKFLOW_SUCCESS_CASE_NOT_MET,
            "message": "no case of the success policy was met",
        }
    else:
        error = _of_node(ended.bad_name, ended.bad_state, ended.bad_error)
    return _encoded(error)


def _of_node(name: str | None, state: str | None, text: str | None) -> dict[str, object]:
    of_node = _decoded(text)
    return {
        "code": of_node.get("code", "UNHANDLED_EXCEPTION"),
        "message": f"node {name} ended {state}: {of_node.get('message', '')}",
        "data": {"node": name, "error": of_node},
        "type": of_node.get("type"),
    }


def _encoded(error: dict[str, object]) -> str:
    return msgspec.json.encode(error).decode()


def _decoded(text: str | None) -> dict[str, object]:
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"message": text}
