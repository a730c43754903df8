"""Types of every kind that a task may carry, for the codec's tests."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import msgspec
import pydantic


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Address:
    street: str
    number: float = 1.0


@dataclass
class MarkedAddress(Address):
    mark: str = "x"


@dataclass(eq=False)
class Incomparable:
    parts: list[int]


@dataclass
class Derived:
    size: int
    area: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.area = self.size**2


@dataclass
class Doubling:
    size: int

    def __post_init__(self) -> None:
        self.size *= 2


class Options(TypedDict, total=False):
    depth: int


class Point(NamedTuple):
    x: int
    y: int = 0


class Item(msgspec.Struct):
    name: str
    tags: set[str] = set()


class SpecialItem(Item):
    price: int = 0


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


class Tree(msgspec.Struct):
    value: int
    children: list[Tree] = []


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    id: int
    share: float | None = None
    label: str = pydantic.Field(default="", alias="Label")


class SpecialModel(Model):
    more: int = 0


class SecretModel(pydantic.BaseModel):
    token: pydantic.SecretStr


class Weird:
    """An object that JSON cannot carry."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")
