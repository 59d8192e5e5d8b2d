"""Results as files: their text, and reading them back, checked against the schema that is shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from pagedkv.errors import PagedKVError

LARGEST_FILE = 256 * 2**20
MOST = 1e30
"""Numbers of a document lie within ``-MOST .. MOST``."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@cache
def result_schema() -> dict[str, Any]:
    """The JSON Schema of all results that can be read back; one definition per ``schema`` in a document."""
    text = files("pagedkv.sim.output").joinpath("result.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def result_text(document: Mapping[str, Any]) -> str:
    """JSON with a line per entry, and one for a whole list of numbers. NaN never occurs in a document.

    >>> print(result_text({"a": {"b": [1, 2.5, None]}, "c": []}), end="")
    {
      "a": {
        "b": [1, 2.5, null]
      },
      "c": []
    }
    """
    return _text(document, "") + "\n"


def _text(value: Any, indent: str) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value, allow_nan=False)
    deeper = indent + "  "
    entries = (f"{deeper}{json.dumps(key)}: {_text(item, deeper)}" for key, item in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def read_result(path: str, *schemas: str) -> dict[str, Any]:
    """A result from a JSON file, if it is one of ``schemas``, such as ``pagedkv.replay/1``.

    Raises:
        PagedKVError: it cannot be read, is no JSON, has another schema or version, or lacks something; the
            message names the file and the place in it.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise PagedKVError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > LARGEST_FILE:
        raise PagedKVError(f"{path} is larger than {LARGEST_FILE:,} bytes: this is no result")
    try:
        document = json.loads(
            content, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_number
        )
    except (ValueError, RecursionError) as error:
        raise PagedKVError(f"{path} is no JSON: {error}") from None
    check_result(document, path, *schemas)
    found: dict[str, Any] = document
    return found


def check_result(document: Any, path: str, *schemas: str) -> None:
    """Refuse what is no complete document of one of the schemas, with the place in it."""
    name = document.get("schema") if isinstance(document, dict) else None
    if name not in schemas:
        got = f"has the schema {name!r}" if name is not None else "has no schema"
        raise PagedKVError(f"{path} {got}; this version reads {' and '.join(schemas)}")
    definition = result_schema()["$defs"][str(name).replace("/", "-")]
    error = _first_error(document, definition, "")
    if error is None and "series" in document:
        error = _uneven(document["series"])
    if error is not None:
        raise PagedKVError(f"{path} is no complete {name} document: {error}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _number(text: str) -> float:
    """A float within ``MOST``, beyond which figures of a report could not be computed with."""
    value = float(text)
    if not -MOST <= value <= MOST:
        raise ValueError(f"{text} is beyond {MOST:g}")
    return value


def _integer(text: str) -> int:
    _number(text)
    return int(text)


def _first_error(value: Any, schema: Mapping[str, Any], place: str) -> str | None:
    """The first violation: of the keywords that the shipped schema uses, no more."""
    if "$ref" in schema:
        schema = result_schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        return f"{place or 'it'} must be {' or '.join(types)}, got {_brief(value)}"
    if "const" in schema and value != schema["const"]:
        return f"{place} must be {schema['const']!r}, got {_brief(value)}"
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        return f"{place} must be at least {schema['minimum']}, got {_brief(value)}"
    if isinstance(value, dict):
        return _first_error_inside(value, schema, f"{place}." if place else "")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            return f"{place} must have at least {schema['minItems']} entries, got {len(value)}"
        items = enumerate(value) if "items" in schema else ()
        errors = (_first_error(item, schema["items"], f"{place}[{i}]") for i, item in items)
        return next((error for error in errors if error), None)
    return None


def _first_error_inside(value: dict[str, Any], schema: Mapping[str, Any], prefix: str) -> str | None:
    lacking = [name for name in schema.get("required", ()) if name not in value]
    if lacking:
        return f"{prefix}{lacking[0]} is missing"
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, item in value.items():
        inside = known.get(name, others)
        error = _first_error(item, inside, prefix + name) if inside else None
        if error:
            return error
    return None


def _is(value: Any, name: str) -> bool:
    # bool is an int in Python and no number in JSON; 2.0 is an integer in JSON Schema
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def _uneven(series: Mapping[str, Any]) -> str | None:
    """Columns of one chart have one length; what a schema cannot say."""
    by_context = series["itl_by_context"]
    tables = {
        "timeline": series["timeline"],
        "itl_by_context.points": by_context["points"],
        "itl_by_context.model": by_context["model"],
        "quantiles": {name: column for name, column in series["quantiles"].items() if column},
    }
    for place, table in tables.items():
        lengths = {name: len(column) for name, column in table.items()}
        if len(set(lengths.values())) > 1:
            return f"the columns of series.{place} differ in length: {lengths}"
    return None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
