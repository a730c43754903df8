"""Types of results that workflows take apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic

T = TypeVar("T")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    amount: int
    note: str = ""


@dataclass
class Payment:
    amount: int
    line: Line
    lines: list[Line] = field(default_factory=list)
    by_id: dict[UUID, Line] = field(default_factory=dict)
    next: Payment | None = None

    @property
    def total(self) -> int:
        return self.amount


@dataclass
class SpecialPayment(Payment):
    why: str = ""


@dataclass
class Page(Generic[T]):
    items: list[T]


class Renamed(msgspec.Struct, rename="camel"):
    user_name: str
    inner_part: Line


class Short(msgspec.Struct, omit_defaults=True):
    always: int
    seldom: int = 0


class Packed(msgspec.Struct, array_like=True):
    first: int
    second: Line


class TaggedPacked(msgspec.Struct, array_like=True, tag="packed"):
    first: int


class Pair(NamedTuple):
    left: int
    right: Line


@dataclass
class Sided:
    left: int


class Keyed(TypedDict):
    name: str
    size: NotRequired[int]


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)

    plain: int
    user_id: int = pydantic.Field(alias="userId")
    written: int = pydantic.Field(validation_alias="asWritten", serialization_alias="asWritten")
    secret: int = pydantic.Field(default=0, exclude=True)


class Root(pydantic.RootModel[list[int]]):
    pass
