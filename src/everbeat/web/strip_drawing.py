"""Draws strips as SVG: attributes and classes only, so that the pages need no inline style. Times come from `domain.pulse.strips`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from markupsafe import Markup, escape

from everbeat.domain.pulse.judging import TreeState
from everbeat.domain.pulse.memory import WINDOW_S
from everbeat.domain.pulse.strips import AHEAD_S, ProcessLine, Spike, Strip, noticed_words
from everbeat.errors.wording import amount, brief_duration, on_one_line
from everbeat.web.wording import shown_text

_HEIGHT: Final = 76
_BASE: Final = 44
_UNITS: Final = 10
"""Units of the drawing for each second."""
_PAST: Final = 100 * WINDOW_S / (WINDOW_S + AHEAD_S)
_LOWEST_SPIKE: Final = 14
_HIGHEST_SPIKE: Final = 34
_FIRST_LANE: Final = 57
_LANE: Final = 4
_MOST_LANES: Final = 5
_TURNS_AFTER_S: Final = 35
"""Words beside a mark that is more recent stand to its left, where there is room."""
_ROOM_FOR_WORDS_S: Final = 38
"""The words to the left of a mark are not wider than this part of the strip, also on a telephone."""
_LONGEST_CAUSE: Final = 48


def strip_svg(strip: Strip) -> Markup:
    """Return the drawing of a strip, with its words as the text alternative."""
    tone = {TreeState.BEATS: "live", TreeState.LEFT: "live", TreeState.DEAD: "live"}.get(strip.state, "late")
    parts = [
        f'<svg class="strip" role="img" aria-label="{shown_text(strip.says)}">',
        f'<svg x="0" y="0" width="{_PAST:.2f}%" height="{_HEIGHT}">',
        f'<svg width="100%" height="{_HEIGHT}" viewBox="0 0 {WINDOW_S * _UNITS} {_HEIGHT}" preserveAspectRatio="none">',
        *_traces(strip),
        "</svg>",
        *_lanes(strip),
        "</svg>",
        f'<rect class="future" x="{_PAST:.2f}%" y="0" width="{100 - _PAST:.2f}%" height="{_HEIGHT}"/>',
        f'<line class="now" x1="{_PAST:.2f}%" x2="{_PAST:.2f}%" y1="0" y2="{_HEIGHT}"/>',
        *_waiting(strip),
        *_death(strip),
        *_exit(strip),
        *_deaths_of_processes(strip),
        *_takeovers(strip),
    ]
    if strip.state in (TreeState.BEATS, TreeState.LATE, TreeState.SUSPECT):
        parts.append(f'<circle class="k-{tone} pen" cx="{_PAST:.2f}%" cy="{_BASE}" r="2.6"/>')
    if strip.is_pooled:
        parts.append(_text(WINDOW_S, 72, "behind a pooler: beats only, no session to watch", "plainly", dx=6))
    parts.append("</svg>")
    return Markup("".join(parts))


def mini_svg(
    spikes: Iterable[float], *, flat_from_s: float | None = None, late_from_s: float | None = None
) -> Markup:
    """Return a small strip of the last 30 s: heartbeats as seconds ago, then amber from one moment or red from another."""
    shown = 30
    until = max((each for each in (flat_from_s, late_from_s) if each is not None), default=0.0)
    beats = sorted((ago for ago in spikes if 0 <= ago <= shown and ago >= until), reverse=True)
    path = "M0 44" + "".join(f"H{(shown - ago) * 10 - 4:.1f}{_SPIKE}" for ago in beats)
    path += f"H{max(0.0, (shown - until) * 10):.1f}"
    parts = [
        '<svg class="mini" viewBox="0 0 300 56" preserveAspectRatio="none" aria-hidden="true">',
        f'<path class="l-live" d="{path}"/>',
    ]
    if until:
        tone = "dead" if flat_from_s is not None else "late"
        parts.append(f'<path class="l-{tone}" d="M{max(0.0, (shown - until) * 10):.1f} 44H300"/>')
    return Markup("".join([*parts, "</svg>"]))


_SPIKE: Final = "l.8 -1.6 .8 1.6 .7 2.2 1.1 -24.2 1.3 27.9 1 -5.9h1.6l1.5 -2.4 1.5 2.4"


def _traces(strip: Strip) -> list[str]:
    """Return the trace, green until the tree was late or gave its last sign of life, and amber afterwards. Draw none if nothing is known."""
    if strip.state is TreeState.UNKNOWN:
        return []
    begins_s = WINDOW_S if strip.born_s is None else strip.born_s
    ends = [each for each in (strip.flat_from_s, strip.left_s, strip.late_from_s) if each is not None]
    if strip.state is TreeState.SUSPECT and not ends:
        ends = [strip.bumps[-1] if strip.bumps else 0.0]
    turns_s = max(ends, default=0.0)
    drawn = [_trace(strip, begins_s, min(turns_s, WINDOW_S), "live")]
    if strip.state in (TreeState.LATE, TreeState.SUSPECT):
        drawn.append(_trace(strip, min(turns_s, WINDOW_S), 0.0, "late"))
    return drawn


def _trace(strip: Strip, from_s: float, until_s: float, tone: str) -> str:
    if from_s <= until_s:
        return ""
    spikes = {spike.ago_s: spike for spike in strip.spikes if until_s <= spike.ago_s <= from_s}
    bumps = [ago for ago in strip.bumps if until_s <= ago <= from_s and not _is_near(ago, spikes)]
    path = [f"M{_x(from_s):.1f} {_BASE}"]
    path += [
        _spike(spikes[ago]) if ago in spikes else f"H{_x(ago) - 1.2:.1f}q1.2 -5.2 2.4 0"
        for ago in sorted([*spikes, *bumps], reverse=True)
    ]
    path.append(f"H{_x(until_s):.1f}")
    return f'<path class="trace l-{tone}" d="{"".join(path)}"/>'


def _spike(spike: Spike) -> str:
    height = _LOWEST_SPIKE + (_HIGHEST_SPIKE - _LOWEST_SPIKE) * spike.load
    rise, fall, back = 0.09 * height, 1.153 * height, 0.243 * height
    return (
        f"H{_x(spike.ago_s) - 3.4:.1f}l.8 -1.6 .8 1.6 .7 {rise:.1f} 1.1 -{height:.1f} 1.3 {fall:.1f} 1 -{back:.1f}"
        f"V{_BASE}h1.6l1.5 -2.4 1.5 2.4"
    )


def _is_near(ago: float, spikes: Iterable[float]) -> bool:
    """Return whether a bump would be drawn into a spike."""
    return any(-1.2 < ago - spike < 0.6 for spike in spikes)


def _lanes(strip: Strip) -> list[str]:
    """Return a thin line for each worker process. A process that replaced another one continues its line."""
    tone = "live" if strip.state in (TreeState.BEATS, TreeState.DEAD, TreeState.LEFT) else "soft"
    drawn = []
    for place, lane in enumerate(lanes_of(strip.processes)):
        y = _FIRST_LANE + _LANE * place
        for line in lane:
            until_s = line.until_s if strip.flat_from_s is None else max(line.until_s, strip.flat_from_s)
            x1, x2 = _of_past(line.from_s), _of_past(until_s)
            drawn.append(f'<line class="l-{tone} half" x1="{x1:.2f}%" x2="{x2:.2f}%" y1="{y}" y2="{y}"/>')
    return drawn


def lanes_of(processes: Sequence[ProcessLine]) -> list[list[ProcessLine]]:
    """Arrange processes in lanes, so that no two in a lane overlap. At most five lanes are returned."""
    lanes: list[list[ProcessLine]] = []
    for line in sorted(processes, key=lambda each: -each.from_s):
        if line.until_s > WINDOW_S:
            continue
        lane = next((each for each in lanes if each[-1].until_s >= line.from_s), None)
        if lane is None:
            lanes.append([line])
        else:
            lane.append(line)
    return lanes[:_MOST_LANES]


def _waiting(strip: Strip) -> list[str]:
    """Return the missing heartbeats as hollow circles, and the moment at which age decides as a dashed line."""
    drawn = [
        f'<circle class="l-late" cx="{_pct(ago):.2f}%" cy="18" r="3"/>'
        for ago in strip.missed
        if ago <= WINDOW_S
    ]
    if strip.missed:
        drawn.append(_before(strip.missed[0], 15, _no_beat(strip), "said k-late", dx=8))
    if strip.decides_s is not None:
        x = _pct(strip.decides_s)
        drawn.append(f'<line class="l-dead dash" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{_HEIGHT}"/>')
        if strip.decides_s < 0:
            drawn.append(
                _text(
                    strip.decides_s, 72, f"age, in {brief_duration(-strip.decides_s)}", "said k-dead e", dx=-6
                )
            )
    if strip.state is TreeState.SUSPECT and strip.bumps and not strip.missed:
        drawn.append(_before(strip.bumps[-1], 32, "its session is lost", "said k-late", dx=8))
    return drawn


def _no_beat(strip: Strip) -> str:
    return f"{amount(len(strip.missed), 'beat')} missing"


def _death(strip: Strip) -> list[str]:
    """Return the flat line of a dead tree, and how and how soon its death was noticed."""
    if strip.flat_from_s is None:
        return []
    from_s = min(strip.flat_from_s, WINDOW_S)
    drawn = [f'<line class="flat" x1="{_pct(from_s):.2f}%" x2="{_PAST:.2f}%" y1="{_BASE}" y2="{_BASE}"/>']
    if strip.flat_from_s <= WINDOW_S:
        x = _pct(strip.flat_from_s)
        drawn.append(f'<line class="l-dead dash" x1="{x:.2f}%" x2="{x:.2f}%" y1="8" y2="70"/>')
        drawn.append(_before(strip.flat_from_s, 14, "last sign of life", "said k-dead", dx=6))
    notice = strip.notice
    if notice is None:
        return drawn
    said = noticed_words(notice)
    if notice.ago_s > WINDOW_S:
        return [*drawn, _text(WINDOW_S, 32, said, "said k-dead", dx=10)]
    x = _pct(notice.ago_s)
    drawn.append(
        f'<rect class="k-dead" x="{x:.2f}%" y="{_BASE - 4}" width="8" height="8" transform="translate(-4 0)"/>'
    )
    drawn.append(_beside(notice.ago_s, 32, said, "said k-dead"))
    return drawn


def _exit(strip: Strip) -> list[str]:
    """Return the black square of an orderly exit."""
    if strip.left_s is None:
        return []
    x = _pct(strip.left_s)
    return [
        f'<rect class="k-wait" x="{x:.2f}%" y="{_BASE - 4}" width="8" height="8" transform="translate(-4 0)"/>',
        _beside(strip.left_s, 32, "shut down", "said k-wait"),
    ]


def _deaths_of_processes(strip: Strip) -> list[str]:
    """Return a cross for each worker process that died alone, with the cause of the last one."""
    drawn = []
    lanes = lanes_of(strip.processes)
    dead = [(place, line) for place, lane in enumerate(lanes) for line in lane if line.death is not None]
    for place, line in dead:
        y = _FIRST_LANE + _LANE * place
        drawn.append(
            f'<svg x="{_pct(line.until_s):.2f}%" y="{y}" overflow="visible">'
            '<path class="l-dead" d="M-2.5 -2.5 2.5 2.5M2.5 -2.5-2.5 2.5"/></svg>'
        )
    if dead:
        last = min((line for _, line in dead), key=lambda line: line.until_s)
        cause = on_one_line(last.death or "")[:_LONGEST_CAUSE]
        drawn.append(_beside(last.until_s, 74, f"a process: {cause}", "said k-dead"))
    return drawn


def _takeovers(strip: Strip) -> list[str]:
    """Return a flash where this tree took over work, with the number of tasks and the dead tree."""
    drawn = []
    for takeover in strip.takeovers:
        if takeover.ago_s <= WINDOW_S:
            drawn.append(
                f'<svg x="{_pct(takeover.ago_s):.2f}%" y="22" overflow="visible">'
                '<path class="k-run" d="M2 -12-5 1H-.5L-2 10 5.5 -3H1z"/></svg>'
            )
            drawn.append(_beside(takeover.ago_s, 24, f"took {takeover.count}", "said k-run"))
    return drawn


def _beside(ago_s: float, y: float, words: str, classes: str) -> str:
    """Return words to the right of a moment, or to its left if it is recent."""
    if ago_s < _TURNS_AFTER_S:
        return _text(ago_s, y, words, f"{classes} e", dx=-10)
    return _text(ago_s, y, words, classes, dx=10)


def _before(ago_s: float, y: float, words: str, classes: str, *, dx: float) -> str:
    """Return words to the left of a moment, or to its right if they would be cut off at the left edge."""
    if ago_s > WINDOW_S - _ROOM_FOR_WORDS_S:
        return _text(ago_s, y, words, classes, dx=dx)
    return _text(ago_s, y, words, f"{classes} e", dx=-dx)


def _text(ago_s: float, y: float, words: str, classes: str, *, dx: float) -> str:
    return f'<text class="{classes}" x="{_pct(ago_s):.2f}%" y="{y}" dx="{dx}">{shown_text(words)}</text>'


def _x(ago_s: float) -> float:
    return (WINDOW_S - ago_s) * _UNITS


def _pct(ago_s: float) -> float:
    """Return where a moment is, in percent of the whole strip."""
    return max(0.0, min(100.0, 100 * (WINDOW_S - ago_s) / (WINDOW_S + AHEAD_S)))


def _of_past(ago_s: float) -> float:
    """Return where a moment is, in percent of the past part."""
    return max(0.0, min(100.0, 100 * (WINDOW_S - ago_s) / WINDOW_S))


def sparkline(values: Sequence[float], *, tone: str = "soft", label: str | None = None) -> Markup:
    """Return a line of values, oldest first. `label` describes it in words. Without it, the page has the same in words beside the line."""
    return _sparkline(tuple(values), tone, label)


@lru_cache(maxsize=512)
def _sparkline(values: tuple[float, ...], tone: str, label: str | None) -> Markup:
    """Return the drawing of a line. A page draws a hundred lines, which change only when their series is read again."""
    if len(values) < 2:
        return Markup("")
    lowest, highest = min(values), max(values)
    size = (highest - lowest) or 1.0
    step = 88 / (len(values) - 1)
    points = [
        f"{place * step:.1f} {17 - 14 * (value - lowest) / size:.1f}" for place, value in enumerate(values)
    ]
    path = "M" + "L".join(points)
    told = 'aria-hidden="true"' if label is None else f'role="img" aria-label="{escape(label)}"'
    return Markup(
        f'<svg class="spark" viewBox="0 0 88 20" preserveAspectRatio="none" {told}><path class="l-{tone}" d="{path}"/></svg>'
    )


def slots_svg(busy: int, slots: int, *, tone: str = "run") -> Markup:
    """Return the slots of a worker as small boxes, at most 20 of them. Above that, each box stands for several slots."""
    boxes = min(slots, 20)
    if boxes == 0:
        return Markup("")
    filled = min(boxes, -(-busy * boxes // slots))
    width = 120 / boxes - 1.4
    drawn = [
        f'<rect class="f-{tone if place < filled else "line"}" x="{place * 120 / boxes:.1f}" y="1" width="{width:.1f}" height="12"/>'
        for place in range(boxes)
    ]
    label = f"{busy} of {amount(slots, 'slot')} busy"
    return Markup(
        f'<svg class="slots" viewBox="0 0 120 14" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    )
