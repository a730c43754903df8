"""How the demo is watched: a live picture on a terminal, plain lines elsewhere, nothing at all when headless.

What lives here: drawing scenes and lines. What may not: anything that knows where they come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everbeat.cli.demo.scene import Audience, Scene, WorkerLine

_STYLES: Final = {
    "alive": "green",
    "frozen": "bold cyan",
    "killed": "bold red",
    "taken over": "yellow",
    "left": "dim",
}
_SIGNS: Final = {"alive": "♥", "frozen": "❄", "killed": "✝", "taken over": "↻", "left": "·"}
_SHORT: Final = {
    "count_on_the_loop": "async",
    "count_in_a_thread": "thread",
    "count_in_a_process": "process",
}
_REMEMBERED: Final = 9
_STATUS_EVERY_S: Final = 2.0
_BAR_WIDTH: Final = 40


class Silence:
    """Nobody watches."""

    def show(self, moment: Scene, /) -> None:
        """Shows nothing."""

    def tell(self, elapsed_s: float, text: str, /) -> None:
        """Tells nothing."""


class PlainLines:
    """What happens, a line each, and now and then how far the work is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status_at_s = 0.0

    def show(self, moment: Scene, /) -> None:
        """Prints a status line, if the last one is some time ago."""
        if moment.elapsed_s - self._status_at_s < _STATUS_EVERY_S:
            return
        self._status_at_s = moment.elapsed_s
        alive = sum(line.condition == "alive" for line in moment.lines)
        running = sum(len(line.running) for line in moment.lines)
        self._print(
            moment.elapsed_s,
            f"  {moment.ended}/{moment.total} files, {running} running, {alive} workers alive",
        )

    def tell(self, elapsed_s: float, text: str, /) -> None:
        """Prints a line."""
        self._print(elapsed_s, text)

    def _print(self, elapsed_s: float, text: str) -> None:
        self._console.print(f"{elapsed_s:5.1f} s  {text}", soft_wrap=True)


class LivePicture:
    """A line per worker, the progress of the work, and what happened last."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._told: deque[Text] = deque(maxlen=_REMEMBERED)
        self._moment = Scene(elapsed_s=0.0, total=0, sent=0, ended=0, lines=())

    def show(self, moment: Scene, /) -> None:
        """Draws the moment."""
        self._moment = moment
        self._live.update(self._picture())

    def tell(self, elapsed_s: float, text: str, /) -> None:
        """Adds a line to what happened."""
        line = Text(f"{elapsed_s:5.1f} s  ", style="dim")
        self._told.append(line.append(text, style=_told_style(text)))
        self._live.update(self._picture())

    def _picture(self) -> Panel:
        moment = self._moment
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            ProgressBar(total=max(1, moment.total), completed=moment.ended, width=_BAR_WIDTH),
            f"{moment.ended} of {moment.total} files counted",
            Text(f"{moment.elapsed_s:.1f} s", style="dim"),
        )
        parts = Group(_workers(moment), Text(), progress, Text(), *self._told)
        return Panel(
            parts, title="everbeat: kill what you like", border_style="blue", padding=(1, 2), expand=True
        )


@contextmanager
def audience(console: Console, *, headless: bool) -> Iterator[Audience]:
    """Whoever watches on this console."""
    if headless:
        yield Silence()
    elif not console.is_terminal:
        yield PlainLines(console)
    else:
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            yield LivePicture(live)


def _told_style(text: str) -> str:
    if "SIGKILL" in text:
        return "bold red"
    if "SIGSTOP" in text or "SIGCONT" in text:
        return "bold cyan"
    return "green" if "rescued" in text or "refused" in text else ""


def _workers(moment: Scene) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, width in (("TREE", 4), ("WORKER", 7), ("", 12), ("BEATS", 5), ("LAST", 6)):
        table.add_column(name, min_width=width, justify="right" if name in ("BEATS", "LAST") else "left")
    for name in ("WORKS ON", "RESCUED FROM IT"):
        table.add_column(name, no_wrap=True)
    for line in moment.lines:
        style = _STYLES[line.condition]
        table.add_row(
            str(line.tree),
            str(line.pid),
            Text(f"{_SIGNS[line.condition]} {line.condition}", style=style),
            "" if line.beats is None else str(line.beats),
            "" if line.beats is None else f"{line.beat_age_s:.1f} s",
            _work(line),
            Text(line.rescued, style="green"),
        )
    return table


def _work(line: WorkerLine) -> Text:
    names = sorted(_SHORT.get(name, name) for name in line.running)
    kinds = [f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names)]
    if line.claimed:
        kinds.append(f"+{line.claimed}")
    return Text(" ".join(kinds), style="" if line.condition == "alive" else "dim")
