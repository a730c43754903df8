"""A workflow as a Mermaid flowchart: for pages that draw such themselves.

What lives here: the text and its escaping. What may not: what is drawn (`drawing`).
"""

from __future__ import annotations

from typing import Final

from everbeat.domain.drawing import Drawn, Picture, printable

_CLASSES: Final = {
    "pending": "fill:#f1f3f5,stroke:#868e96,color:#212529",
    "ready": "fill:#e7f5ff,stroke:#4dabf7,color:#212529",
    "enqueued": "fill:#d0ebff,stroke:#1c7ed6,color:#212529",
    "running": "fill:#fff3bf,stroke:#f08c00,color:#212529",
    "completed": "fill:#d3f9d8,stroke:#2f9e44,color:#212529",
    "failed": "fill:#ffe3e3,stroke:#e03131,color:#212529,stroke-width:3px",
    "cancelled": "fill:#f3d9fa,stroke:#9c36b5,color:#212529",
    "expired": "fill:#f3d9fa,stroke:#9c36b5,color:#212529",
    "skipped": "fill:#f8f9fa,stroke:#adb5bd,color:#868e96,stroke-dasharray:4",
}
_SHAPES: Final = {"task": ('["', '"]'), "workflow": ('[["', '"]]'), "map": ('{{"', '"}}')}
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:()…")


def mermaid(picture: Picture) -> str:
    """The flowchart, from top to bottom, a class for each state; maps are hexagons, workflows in it have double sides."""
    names = {box.key: f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = ["flowchart TD"]
    lines += [f"    {names[box.key]}{_shape(box)}:::{box.state.lower()}" for box in picture.boxes]
    lines += [f"    {names[parent]} --> {names[box.key]}" for box in picture.boxes for parent in box.needs]
    if picture.left_out:
        lines.append(f'    rest["and {picture.left_out:,} more nodes, which are not drawn"]')
    there = {box.state.lower() for box in picture.boxes}
    lines += [f"    classDef {name} {style}" for name, style in _CLASSES.items() if name in there]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """The text as Mermaid shows it, whatever it means to Mermaid or to HTML."""
    return "".join(each if each in _PLAIN or each.isalnum() else f"#{ord(each)};" for each in printable(text))


def _shape(box: Drawn) -> str:
    left, right = _SHAPES[box.kind]
    said = "<br/>".join(escaped(text) for text in (box.label, box.status, box.rule, box.child) if text)
    return f"{left}{said}{right}"
