"""The messages of the channel tests."""

from __future__ import annotations

import msgspec


class Say(msgspec.Struct, tag="say"):
    text: str


class Number(msgspec.Struct, tag="number"):
    value: int


Message = Say | Number
