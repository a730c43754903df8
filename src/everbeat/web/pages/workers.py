"""The worker trees, those in trouble first, the departed ones with their cause, and one worker with its snapshots and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from msgspec import Struct, structs

from everbeat.client.database_access import database_of
from everbeat.domain.documents import task_document
from everbeat.domain.inspection import SupervisorInfo, WorkerInfo, WorkerStateInfo
from everbeat.domain.pulse.judging import TreeState
from everbeat.domain.pulse.memory import TreeTrace
from everbeat.domain.pulse.sample import SampledWorker
from everbeat.domain.pulse.sentences import Said, workers_say
from everbeat.domain.pulse.wording import names_of
from everbeat.domain.recovery.liveness import FAREWELL
from everbeat.errors import UnknownName
from everbeat.errors.wording import amount, brief_duration, spoken_way
from everbeat.store.plan import ask
from everbeat.store.snapshots import latest_states
from everbeat.web import rendering
from everbeat.web.live import Parts, PulsePicture
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.pages.pulse import TREE_MARKS, mini_of, times_of, tree_document, vital_html
from everbeat.web.past import read_past
from everbeat.web.refusals import RequestRefused
from everbeat.web.snapshot_lines import NAMES, lines_of
from everbeat.web.strip_drawing import mini_svg, slots_svg
from everbeat.web.wording import Mark

COMMAND: Final = "everbeat workers"
_PARTS: Final = {"live-say": "workers_say.html", "live-trees": "workers_trees.html"}
_TROUBLE: Final = (TreeState.SUSPECT, TreeState.LATE)
_SHOWN: Final = 200
_MOST_PROCESSES: Final = 64
_SNAPSHOTS: Final = 240
_SNAPSHOTS_OF_EACH: Final = 120
_MOST_DRAWN: Final = 16
_MOST_LISTED: Final = 1_000
_DEPARTED: Final = timedelta(hours=24)
_SLOW_LAG_MS: Final = 1_000


class ProcessRow(Struct, frozen=True, kw_only=True):
    """A worker process of a tree."""

    worker: SampledWorker
    mark: Mark
    slots: str
    is_slow: bool


class TreePanel(Struct, frozen=True, kw_only=True):
    """A tree with its processes. `facts` are short remarks, `note` says what an operator should know about a tree in trouble."""

    trace: TreeTrace
    name: str
    mark: Mark
    state: str
    mini: str
    facts: str
    note: str | None
    processes: tuple[ProcessRow, ...]
    more: int


async def show(visit: Visit) -> PageResult:
    """Show all trees, and those that departed in the last 24 hours, now or at a past moment."""
    view = None if visit.at is None else await read_past(visit, visit.at)
    picture = await visit.web.live.picture() if view is None else view.picture
    content = _content(picture)
    if view is not None and not view.knows_trees:
        content["say"] = Said("late", "Which worker trees were running is not known")
    departed = await visit.part("The departed workers", _departed(visit, picture), None)
    return Page(
        template="workers.html",
        title="Workers",
        says=content["say"].lead,
        data={
            "trees": [_document(panel, picture) for panel in content["panels"]],
            "departed": None if departed is None else [structs.asdict(each) for each in departed],
            **({} if view is None else view.document()),
        },
        more={
            **content,
            **times_of(picture),
            "gone": departed,
            "view": view,
            "mini": mini_of(picture.memory.traces, picture),
        },
        command=COMMAND,
    )


async def stream(visit: Visit) -> PageResult:
    """Stream the parts of the page that change."""
    key = f"workers {visit.link('/')} {visit.may('operate')} {visit.may('admin')}"
    return await visit.web.live.stream(visit, key, partial(_parts, visit))


async def show_one(visit: Visit) -> PageResult:
    """Show one worker or supervisor: what it holds, its last snapshots, and the tasks that were recovered from it."""
    party = visit.path_values["worker_id"]
    picture = await visit.web.live.picture()
    trace = next((each for each in picture.memory.traces if party in _ids(each)), None)
    known = None if trace is not None else await _known(visit, party)
    worker = None if trace is None else next((each for each in trace.workers if each.id == party), None)
    found = await visit.parts(
        tasks=(
            "Its tasks",
            visit.app.alist_tasks(worker=party, state=["CLAIMED", "RUNNING"], limit=100),
            None,
        ),
        snapshots=("Its snapshots", visit.app.aworker_states(party, limit=_SNAPSHOTS), []),
        processes=("The snapshots of its processes", _processes(visit, trace, worker), {}),
        recoveries=("Its recoveries", visit.app.arecoveries(worker=party, limit=50), []),
    )
    if trace is None and known is None and found["tasks"] is not None and not any(found.values()):
        raise UnknownName("worker or supervisor", [party], known=_living(picture.memory.traces))
    tasks = [visit.hiding.summary(task) for task in found["tasks"] or ()]
    snapshots, processes = found["snapshots"], found["processes"]
    return Page(
        template="worker.html",
        title=party,
        says=_one_says(party, trace, worker, known),
        data={
            "worker": worker if worker is not None else known,
            "tree": None if trace is None else tree_document(trace, (), picture),
            "tasks": None if found["tasks"] is None else [task_document(task) for task in tasks],
            "snapshots": [*snapshots, *(state for states in processes.values() for state in states)],
        },
        more={
            "trace": trace,
            "held": None if found["tasks"] is None else tasks,
            "found_recoveries": found["recoveries"],
            "lines": lines_of(snapshots),
            "last": snapshots[0] if snapshots else None,
            "names": NAMES,
            "processes": [(worker_id, lines_of(states)) for worker_id, states in processes.items()],
            "not_drawn": 0 if not processes or trace is None else len(trace.crew) - len(processes),
            "mark": None if trace is None else _mark_of(trace, worker),
            "one": worker if worker is not None else None if trace is None else trace.tree,
            **times_of(picture),
        },
        command=COMMAND
        if worker is None and not isinstance(known, WorkerInfo)
        else f"{COMMAND} --history {party}",
    )


async def quiet(visit: Visit) -> PageResult:
    """Stop the workers of a tree from claiming."""
    return _ordered(
        visit,
        await visit.app.aquiet_workers([visit.path_values["supervisor_id"]]),
        "claims nothing until it is resumed",
    )


async def resume(visit: Visit) -> PageResult:
    """Let the workers of a tree claim again."""
    return _ordered(
        visit, await visit.app.aresume_workers([visit.path_values["supervisor_id"]]), "claims tasks again"
    )


async def release(visit: Visit) -> PageResult:
    """Declare the workers of a tree in trouble dead, even if they live, and recover their tasks at once.

    A tree that beats is not released: the operator's page is old, or the tree has come back while the operator decided.
    """
    wanted = visit.path_values["supervisor_id"]
    traces = (await visit.web.live.picture()).memory.traces
    if any(
        trace.tree.id == wanted and trace.tree.ended_at is None and _note(trace) is None for trace in traces
    ):
        raise RequestRefused(
            409,
            "TREE_BEATS",
            "The tree beats, so nothing was released.",
            fix="load the page again; 'everbeat workers release' also releases workers that beat.",
        )
    workers = await visit.app.alist_workers(ended=False, limit=_MOST_LISTED)
    ids = [worker.worker_id for worker in workers if worker.supervisor_id == wanted]
    if not ids:
        raise UnknownName(
            "supervisor with live workers", [wanted], known=[trace.tree.id for trace in traces if trace.crew]
        )
    result = await visit.app.arelease_workers(ids)
    says = f"{amount(len(ids), 'worker')} released: {amount(result.recovered_count, 'task')} recovered."
    return ActionDone(goto=visit.link("/workers"), says=says, data={"result": structs.asdict(result)})


def _ordered(visit: Visit, trees: Sequence[Any], what: str) -> ActionDone:
    names = ", ".join(tree.hostname for tree in trees) or "No tree"
    return ActionDone(
        goto=visit.link("/workers"),
        says=f"{names} {what}.",
        data={"trees": [structs.asdict(each) for each in trees]},
    )


def _parts(visit: Visit, picture: PulsePicture) -> Parts:
    context = {**_content(picture), **times_of(picture)}
    parts = {name: rendering.fragment(visit, template, context) for name, template in _PARTS.items()}
    return parts | {"live-vital": vital_html(visit, picture)}


def _content(picture: PulsePicture) -> dict[str, Any]:
    live = [trace for trace in picture.memory.traces if trace.tree.ended_at is None]
    names = names_of(trace.tree for trace in picture.memory.traces)
    panels = [_panel(trace, names[trace.tree.id], picture) for trace in sorted(live, key=_order)[:_SHOWN]]
    crew = [worker for trace in live for worker in trace.crew]
    slots = [worker.slots for worker in crew if worker.slots is not None]
    states = [trace.judgement.state for trace in live]
    return {
        "say": workers_say(picture.memory.traces, names=names, is_standby=_is_standby(picture)),
        "panels": panels,
        "not_shown": max(0, len(live) - _SHOWN),
        "trees": len(live),
        "beat": states.count(TreeState.BEATS),
        "late": states.count(TreeState.LATE) + states.count(TreeState.SUSPECT),
        "unknown": states.count(TreeState.UNKNOWN),
        "processes": len(crew),
        "running": sum(worker.running for worker in crew),
        "claimed": sum(worker.claimed for worker in crew),
        "slots": sum(slots) if slots else None,
        "codes": sorted({trace.tree.code for trace in live if trace.tree.code is not None}),
        "problem": picture.problem,
    }


def _order(trace: TreeTrace) -> tuple[int, str, str]:
    """Sort trees in trouble first, then by the name of the machine."""
    state = trace.judgement.state
    rank = _TROUBLE.index(state) if state in _TROUBLE else len(_TROUBLE) + (trace.tree.start_problem is None)
    return rank, trace.tree.hostname, trace.tree.id


def _panel(trace: TreeTrace, name: str, picture: PulsePicture) -> TreePanel:
    judgement = trace.judgement
    beats = [(picture.at - at).total_seconds() for at, _ in trace.beats]
    is_late = judgement.state in _TROUBLE
    is_known = judgement.state is not TreeState.UNKNOWN
    silent = brief_duration(judgement.silent_s)
    processes = trace.crew[:_MOST_PROCESSES]
    return TreePanel(
        trace=trace,
        name=name,
        mark=TREE_MARKS[judgement.state],
        state=(
            "a standby gets its heartbeats late" if _is_standby(picture) else "its heartbeats are not kept"
        )
        if not is_known
        else f"no beat for {silent}"
        if is_late and not judgement.session_lost
        else "its session is lost"
        if is_late
        else f"beats, {silent} ago",
        mini=mini_svg(beats, late_from_s=max(0.1, judgement.silent_s - judgement.beat_s) if is_late else None)
        if is_known
        else "",
        facts=" · ".join(_facts(trace, picture)),
        note=None if picture.is_past else _note(trace),
        processes=tuple(_process(worker, judgement.state) for worker in processes),
        more=len(trace.crew) - len(processes),
    )


def _is_standby(picture: PulsePicture) -> bool:
    return picture.memory.last is not None and picture.memory.last.is_standby


def _facts(trace: TreeTrace, picture: PulsePicture) -> list[str]:
    tree, judgement = trace.tree, trace.judgement
    session = (
        "session held" if tree.locked else "session lost" if judgement.session_lost else "no session to watch"
    )
    facts = [tree.hostname] if picture.is_past else [tree.hostname, session]
    if judgement.state in _TROUBLE:
        facts.append(f"beat {tree.beat_seq:,} was its last")
    queues = {queue for worker in trace.crew for queue in worker.queues or ("all queues",)}
    if queues:
        facts.append(", ".join(sorted(queues)[:5]) + (" …" if len(queues) > 5 else ""))
    facts.append(f"up {brief_duration((picture.at - tree.started_at).total_seconds())}")
    if tree.sessions:
        facts.append(amount(tree.sessions, "connection"))
    if tree.code is not None:
        facts.append(f"schema {tree.code}")
    if tree.quiet_since is not None:
        facts.append("quiet: claims nothing")
    if tree.draining:
        facts.append("draining")
    return facts


def _note(trace: TreeTrace) -> str | None:
    judgement, tree = trace.judgement, trace.tree
    if tree.start_problem is not None:
        return f"It cannot start a worker process: {tree.start_problem}"
    if judgement.state not in _TROUBLE:
        return None
    if judgement.session_lost:
        return "Neither its session lock nor any of its sessions is left. Unless it comes back, it is declared dead within seconds."
    seen = (
        "Its session is held, but nothing moves: the machine might be frozen, or the supervisor stopped."
        if tree.locked
        else "Nothing is heard of it."
    )
    if judgement.decides_in_s is None:
        return f"{seen} Recovery by age is off, so its {amount(trace.held, 'task')} stay with it until you release it."
    verb = "is" if trace.held == 1 else "are"
    when = f"in {brief_duration(judgement.decides_in_s)}" if judgement.decides_in_s > 0 else "now"
    recovered = f"its {amount(trace.held, 'task')} {verb} recovered"
    return f"{seen} Age decides {when}, and then {recovered}. If you know that it is gone, release it: they run again at once."


def _process(worker: SampledWorker, state: TreeState) -> ProcessRow:
    is_late = state in _TROUBLE
    mark = Mark("live", "s-live", "live") if state is TreeState.BEATS else TREE_MARKS[state]
    drawing = (
        ""
        if worker.slots is None
        else slots_svg(worker.running, worker.slots, tone="late" if is_late else "run")
    )
    return ProcessRow(
        worker=worker, mark=mark, slots=drawing, is_slow=(worker.loop_lag_ms or 0) >= _SLOW_LAG_MS
    )


class Departed(Struct, frozen=True, kw_only=True):
    """A tree or worker process that ended in the last 24 hours, and why."""

    id: str
    kind: str
    hostname: str
    pid: int
    ended_at: Any
    how: str
    cause: str | None
    is_farewell: bool


async def _departed(visit: Visit, picture: PulsePicture) -> list[Departed]:
    supervisors = await visit.app.alist_supervisors(limit=_MOST_LISTED)
    workers = await visit.app.alist_workers(limit=_MOST_LISTED)
    since = picture.at - _DEPARTED
    ended_trees = {
        each.supervisor_id
        for each in supervisors
        if each.ended_at is not None and each.ended_at <= picture.at
    }
    found = [
        _gone_tree(each)
        for each in supervisors
        if each.ended_at is not None and since < each.ended_at <= picture.at
    ]
    found += [
        _gone_worker(each)
        for each in workers
        if each.ended_at is not None
        and since < each.ended_at <= picture.at
        and each.supervisor_id not in ended_trees
    ]
    return sorted(found, key=lambda each: (each.ended_at, each.id), reverse=True)[:_SHOWN]


def _gone_tree(tree: SupervisorInfo) -> Departed:
    how = tree.ended_how or "unknown"
    return Departed(
        id=tree.supervisor_id, kind="tree", hostname=tree.slot or tree.hostname, pid=tree.pid, ended_at=tree.ended_at,
        how=how, cause=None, is_farewell=how == FAREWELL,
    )  # fmt: skip


def _gone_worker(worker: WorkerInfo) -> Departed:
    how = worker.ended_how or "unknown"
    return Departed(
        id=worker.worker_id, kind="process", hostname=worker.hostname, pid=worker.pid, ended_at=worker.ended_at,
        how=how, cause=worker.ended_cause, is_farewell=how == FAREWELL,
    )  # fmt: skip


async def _known(visit: Visit, party: str) -> WorkerInfo | SupervisorInfo | None:
    """Return a worker or supervisor that the pulse does not show, because it ended some time ago."""
    for worker in await visit.app.alist_workers(limit=_MOST_LISTED):
        if worker.worker_id == party:
            return worker
    for tree in await visit.app.alist_supervisors(limit=_MOST_LISTED):
        if tree.supervisor_id == party:
            return tree
    return None


def _living(traces: Iterable[TreeTrace]) -> list[str]:
    """Return the ids of the trees and worker processes that have not ended."""
    live = [trace for trace in traces if trace.tree.ended_at is None]
    return [party for trace in live for party in (trace.tree.id, *(worker.id for worker in trace.crew))]


def _ids(trace: TreeTrace) -> set[str]:
    return {trace.tree.id, *(worker.id for worker in trace.workers)}


def _one_says(
    party: str,
    trace: TreeTrace | None,
    worker: SampledWorker | None,
    known: WorkerInfo | SupervisorInfo | None,
) -> str:
    ended_at = worker.ended_at if worker is not None else None if trace is None else trace.tree.ended_at
    if trace is not None and ended_at is None and trace.tree.ended_at is None:
        held = trace.held if worker is None else worker.claimed + worker.running
        silent = brief_duration(trace.judgement.silent_s)
        beats = (
            "Its tree beats"
            if trace.judgement.state is TreeState.BEATS
            else f"Its tree has been silent for {silent}"
        )
        return f"{beats}, and it holds {amount(held, 'task')}"
    how = (
        worker.ended_how
        if worker is not None
        else trace.tree.ended_how
        if trace is not None
        else None
        if known is None
        else known.ended_how
    )
    if how == FAREWELL:
        return "It shut down in an orderly way"
    return f"It has ended, noticed by {spoken_way(how)}" if how else f"Only records of {party} remain"


def _mark_of(trace: TreeTrace, worker: SampledWorker | None) -> Mark:
    """Return the mark of a tree, or of one of its processes, which can be dead while the tree lives."""
    if worker is None or worker.ended_at is None:
        return TREE_MARKS[trace.judgement.state]
    return TREE_MARKS[TreeState.DEAD if worker.is_dead else TreeState.LEFT]


async def _processes(
    visit: Visit, trace: TreeTrace | None, worker: SampledWorker | None
) -> Mapping[str, Sequence[WorkerStateInfo]]:
    """Return the last snapshots of the live processes of a tree, by worker. A page about one worker has none."""
    if trace is None or worker is not None:
        return {}
    ids = [each.id for each in trace.crew[:_MOST_DRAWN]]
    return await database_of(visit.app).arun(ask(latest_states(ids, each=_SNAPSHOTS_OF_EACH)))


def _document(panel: TreePanel, picture: PulsePicture) -> dict[str, Any]:
    return {
        **tree_document(panel.trace, (), picture),
        "says": panel.state,
        "slot": panel.trace.tree.slot,
        "quiet_since": panel.trace.tree.quiet_since,
        "draining": panel.trace.tree.draining,
        "start_problem": panel.trace.tree.start_problem,
        "workers": [structs.asdict(worker) for worker in panel.trace.crew],
    }
