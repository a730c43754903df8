"""Types that msgspec does not know and tasks may carry: pydantic models, TaskError, `object`, and plain
subclasses.

What lives here: the two hooks of msgspec, and which classes they serve. What may not: an import of
pydantic; a model can only exist where its owner imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from everbeat.domain.failure import error_from_json, error_to_json
from everbeat.domain.outcome import TaskError


def is_carried(cls: type) -> bool:
    """Whether values of this class, which msgspec calls custom, go through JSON and come back equal."""
    return cls in (object, TaskError) or _is_pydantic_model(cls)


def encode_foreign(value: Any) -> Any:
    """The `enc_hook` of every encoder: JSON or something simpler; raises TypeError for anything else."""
    if isinstance(value, TaskError):
        return msgspec.Raw(error_to_json(value))
    if _is_pydantic_model(type(value)):
        # Pydantic's own JSON, not its dict: strict models take a date from text in JSON mode only.
        return msgspec.Raw(value.model_dump_json(by_alias=True, round_trip=True).encode())
    # Safe strings of template engines and NumPy scalars are subclasses that hold nothing more.
    for plain in (str, int, float):
        if isinstance(value, plain):
            return getattr(plain, f"__{plain.__name__}__")(value)
    raise TypeError(f"{type(value).__qualname__} is not JSON")


def decode_foreign(cls: type, value: Any) -> Any:
    """The `dec_hook` of every decoder."""
    if cls is object:
        return value
    if cls is TaskError:
        return error_from_json(msgspec.json.encode(value))
    if _is_pydantic_model(cls):
        return cls.model_validate_json(msgspec.json.encode(value))  # type: ignore[attr-defined]
    raise NotImplementedError(f"{cls.__qualname__} cannot be made from JSON")


def fields_of(value: object) -> Mapping[str, Any] | None:
    """The fields of a struct, dataclass, attrs object or pydantic model by name; None for anything else."""
    cls = type(value)
    names = (
        getattr(cls, "__struct_fields__", None)
        or getattr(cls, "__dataclass_fields__", None)
        or getattr(cls, "model_fields", None)
        or [attribute.name for attribute in getattr(cls, "__attrs_attrs__", ())]
    )
    if not names:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_pydantic_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(cls, type) and issubclass(cls, pydantic.BaseModel)
