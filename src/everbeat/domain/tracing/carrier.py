"""Carriers: the texts, such as a `traceparent`, that connect a task with the trace in which it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

Carrier: TypeAlias = Mapping[str, str]
"""Texts by their names, such as `traceparent`, `tracestate` and `baggage`."""

NO_CARRIER: Final[Carrier] = {}
PREVIOUS: Final = "everbeat-previous"
"""The name of the text that names the previous attempt: its number, its trace id and its span id, joined by hyphens."""
CARRIER_BYTES: Final = 8_192
"""The maximum JSON size of a stored carrier, in bytes. Texts that do not fit are left out, `baggage` before all others."""
_BAGGAGE: Final = "baggage"
_STORED_BYTES: Final = 16_384
"""The maximum JSON size of a carrier that is read. A row that was changed by hand can contain more."""
_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)


def merged(carriers: Iterable[Carrier]) -> Carrier:
    """Return one carrier with the texts of all carriers. If two contain the same name, the later text counts, but baggage is joined."""
    found: dict[str, str] = {}
    for carrier in carriers:
        baggage = [text for text in (found.get(_BAGGAGE), carrier.get(_BAGGAGE)) if text]
        found |= carrier
        if len(baggage) == 2:
            found[_BAGGAGE] = ",".join(baggage)
    return found


def encode_carrier(carrier: Carrier) -> str | None:
    """Return the carrier as JSON text to store, or None if it is empty. Values that are not texts are left out, and so is what does not fit."""
    kept: dict[str, str] = {}
    room = CARRIER_BYTES - 2
    for name in sorted(carrier, key=_order):
        text = carrier[name]
        if not (
            isinstance(name, str) and isinstance(text, str) and name.isprintable() and text.isprintable()
        ):
            continue
        size = len(msgspec.json.encode({name: text}))
        if size <= room:
            kept[name] = text
            room -= size
    return msgspec.json.encode(kept).decode() if kept else None


def carrier_of(stored: Any) -> Carrier:
    """Return the carrier in a decoded JSON value. Values that are not texts are left out, because the row might have been changed by hand."""
    if not isinstance(stored, dict):
        return NO_CARRIER
    return {name: text for name, text in stored.items() if isinstance(text, str) and text.isprintable()}


def decode_carrier(stored: str | None) -> Carrier:
    """Return the carrier in a stored JSON text, or an empty carrier if the text is too long or cannot be read."""
    if stored is None or len(stored) > _STORED_BYTES:
        return NO_CARRIER
    try:
        return carrier_of(msgspec.json.decode(stored))
    except _BROKEN:
        return NO_CARRIER


def _order(name: object) -> tuple[bool, bool, str]:
    return name != "traceparent", name == "baggage", str(name)
