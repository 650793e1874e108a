"""Arrow tables of answers: a column for each field of the struct, with timestamps and nested structs as such."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

from kvscope.monitor.errors import CannotTell
from kvscope.monitor.text import moment

TIMES: Final = frozenset({"at", "since", "until", "arrived", "resolved_at", "uncertain_since"})
"""Fields that hold RFC 3339 times: they become timestamps in nanoseconds, UTC."""


def arrow_table(rows: Sequence[msgspec.Struct], kind: type[msgspec.Struct]) -> Any:
    """Return a pyarrow.Table of structs of one type. A value of any type becomes JSON text.

    Raises CannotTell where pyarrow is not installed.
    """
    pa = _pyarrow()
    fields = _struct_fields(kind)
    columns = {
        name: pa.array([_arrow_value(getattr(row, name), info, name) for row in rows], _arrow_type(pa, info, name))
        for name, info in fields.items()
    }
    return pa.table(columns)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise CannotTell(f"Arrow tables need pyarrow: pip install 'kvscope[monitor]' ({error})") from error
    return pyarrow


@functools.cache
def _struct_fields(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.name: _required(field.type) for field in info.fields}


def _required(info: inspect.Type) -> inspect.Type:
    """Return the type of a value that is there, where it may be None."""
    if isinstance(info, inspect.UnionType):
        types = [each for each in info.types if not isinstance(each, inspect.NoneType)]
        return types[0] if len(types) == 1 else inspect.AnyType()
    return info


def _arrow_type(pa: Any, info: inspect.Type, name: str) -> Any:
    match info:
        case inspect.StrType() if name in TIMES:
            return pa.timestamp("ns", "UTC")
        case inspect.StrType() | inspect.LiteralType():
            return pa.string()
        case inspect.BoolType():
            return pa.bool_()
        case inspect.IntType():
            return pa.int64()
        case inspect.FloatType():
            return pa.float64()
        case inspect.BytesType():
            return pa.binary()
        case inspect.CollectionType():
            return pa.list_(_arrow_type(pa, _required(info.item_type), ""))
        case inspect.DictType() if not isinstance(info.value_type, inspect.AnyType):
            return pa.map_(pa.string(), _arrow_type(pa, _required(info.value_type), ""))
        case inspect.StructType():
            return pa.struct(
                [(field, _arrow_type(pa, each, field)) for field, each in _struct_fields(info.cls).items()]
            )
    return pa.string()


def _arrow_value(value: Any, info: inspect.Type, name: str) -> Any:
    """Return a value as Arrow takes it."""
    if value is None or value is msgspec.UNSET:
        return None
    match info:
        case inspect.StrType() if name in TIMES:
            return moment(value, 0)
        case inspect.CollectionType():
            return [_arrow_value(each, _required(info.item_type), "") for each in value]
        case inspect.DictType() if not isinstance(info.value_type, inspect.AnyType):
            return [(key, _arrow_value(each, _required(info.value_type), "")) for key, each in value.items()]
        case inspect.StructType():
            return {
                field: _arrow_value(getattr(value, field), each, field)
                for field, each in _struct_fields(info.cls).items()
            }
        case inspect.AnyType() | inspect.DictType():
            return msgspec.json.encode(value).decode()
    return value
