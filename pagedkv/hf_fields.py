"""Fields of a Hugging Face ``config.json``, each read with its refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pagedkv.errors import SpecError

_MAX_LAYERS: Final = 10_000


@dataclass(frozen=True)
class HFConfig:
    """The text part of a ``config.json``. Reads fields and refuses bad values.

    A field is looked up under its common name first, then under the family's own (``n_layer`` of GPT-2).

    >>> config = HFConfig("gpt2", {"n_layer": 12}, aliases={"num_hidden_layers": "n_layer"})
    >>> config.integer("num_hidden_layers")
    12
    >>> config.integer("n_ctx")
    Traceback (most recent call last):
    pagedkv.errors.SpecError: gpt2 config: n_ctx is missing; supported: an integer of at least 1
    """

    model_type: str
    values: Mapping[str, object]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The family's own name of a field, by its common name."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What the family's published files leave out."""

    def _key(self, name: str) -> str:
        alias = self.aliases.get(name, name)
        return alias if name not in self.values and alias in self.values else name

    def get(self, name: str) -> object:
        """The value of a field; when it is absent or null, the family's default, or None."""
        value = self.values.get(self._key(name))
        return self.defaults.get(name) if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return self._key(name) in self.values

    def error(self, name: str, supported: str) -> SpecError:
        """The error that names this field, its value and what is supported."""
        alias = self.aliases.get(name)
        label = f"{name} ({alias})" if alias else name
        state = f"is {self.get(name)!r}" if self.has(name) else "is missing"
        return SpecError(f"{self.model_type} config: {label} {state}; supported: {supported}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer field of at least ``minimum``; ``default`` when it is absent or null.

        Raises:
            SpecError: it is no such integer, or is missing and has no default.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A true or false field; ``default`` when it is absent or null.

        Raises:
            SpecError: it is neither.
        """
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        value = self.integer("num_hidden_layers")
        if value > _MAX_LAYERS:
            raise self.error("num_hidden_layers", f"at most {_MAX_LAYERS}")
        return value

    @property
    def num_q_heads(self) -> int:
        """Query heads per layer."""
        return self.integer("num_attention_heads")


def read_json(path: Path) -> Mapping[str, object]:
    """The object in a JSON file, or in the ``config.json`` of a folder; ``SpecError`` if there is none."""
    try:
        file = path / "config.json" if path.is_dir() else path
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise SpecError(f"cannot read {path}: {reason}; expected a config.json or its folder") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise SpecError(f"{path} holds a JSON {type(values).__name__}; expected an object")
    return values
