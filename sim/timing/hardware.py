"""The hardware file: what a device has and reaches, each number with its conditions.

::

    {"schema": "pagedkv.hardware/1", "name": ..., "created": ..., "conditions": {...},
     "figures": {"memory_bytes": F, "bandwidth": F, "flops": F, "weights": F, "compute": F, "layer_s": F,
                 "per_sequence_s": F},
     "attention": {"bf16": {"fixed_s": F, "byte_cost": F, "row_cost": F, "head_cost": F}, ...},
     "measurements": [...]}

    F = {"value": 1.0, "how": "measured", "what": "...", "when": "2026-01-31T12:00:00+00:00",
         "repetitions": 7}

``bandwidth`` is in bytes per second and ``flops`` in dense 16-bit FLOP per second, both peaks that the shares
``weights`` and ``compute`` and the costs of ``attention`` (see ``AttentionConstants``) refer to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.attention_constants import AttentionConstants
from pagedkv.sim.timing.gpus import GPU
from pagedkv.sim.timing.rates import DeviceRates

SCHEMA: Final = "pagedkv.hardware/1"
HOW: Final = ("measured", "fitted", "published", "stated", "reported")
FIGURES: Final = ("memory_bytes", "bandwidth", "flops", "weights", "compute", "layer_s", "per_sequence_s")
ATTENTION: Final = ("fixed_s", "byte_cost", "row_cost", "head_cost")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from.

    Attributes:
        value: in the base unit of its name.
        how: measured (here, by us), fitted (to measured points), published (a table of this library),
            stated (by the user) or reported (by the system).
        what: in words, with sizes.
        when: ISO 8601 time with a zone, or None for published figures.
        repetitions: measurements behind it, 0 where none were made.
    """

    value: float
    how: str
    what: str
    when: str | None = None
    repetitions: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no number, and an origin that the file does not know."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise PagedKVError(f"a figure needs a number, got {self.value!r}")
        if not math.isfinite(self.value) or self.how not in HOW:
            raise PagedKVError(f"a figure is finite and {', '.join(HOW)}, got {self.value} and {self.how!r}")


@dataclass(frozen=True)
class Hardware:
    """The content of a hardware file.

    Attributes:
        figures: by the names of ``FIGURES``, all of them.
        attention: by KV dtype, then by the names of ``ATTENTION``, all of them.
        conditions: machine, versions, or the model and points of a calibration.
        measurements: the single measurements that the figures come from.
    """

    name: str
    created: str
    figures: Mapping[str, Figure]
    attention: Mapping[str, Mapping[str, Figure]]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    measurements: Sequence[Mapping[str, Any]] = ()

    @property
    def gpu(self) -> GPU:
        """The device, as ``load_gpu`` would give it, with its rates."""
        value = {name: self.figures[name].value for name in FIGURES}
        rates = DeviceRates(
            {
                dtype: AttentionConstants(*(costs[name].value for name in ATTENTION))
                for dtype, costs in self.attention.items()
            },
            value["weights"],
            value["compute"],
            value["layer_s"],
            value["per_sequence_s"],
        )
        for name in ("memory_bytes", "bandwidth", "flops"):
            if value[name] <= 0:
                raise PagedKVError(f"{name} must be above 0, got {value[name]}")
        return GPU(
            self.name,
            int(value["memory_bytes"]),
            value["bandwidth"],
            None,
            value["flops"],
            None,
            None,
            source=f"hardware file of {self.created}",
            rates=rates,
        )

    def document(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "created": self.created,
            "conditions": dict(self.conditions),
            "figures": {name: asdict(self.figures[name]) for name in FIGURES},
            "attention": {
                dtype: {name: asdict(costs[name]) for name in ATTENTION}
                for dtype, costs in sorted(self.attention.items())
            },
            "measurements": [dict(row) for row in self.measurements],
        }


def read_hardware(path: str | Path) -> Hardware:
    """Read a hardware file.

    Raises:
        PagedKVError: no JSON, another schema, or a figure that is missing or impossible; with the path.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise PagedKVError(f"no hardware file of schema {SCHEMA}: found {found!r}")
        hardware = Hardware(
            str(document["name"]),
            str(document["created"]),
            _figures(document["figures"], FIGURES),
            {str(dtype): _figures(costs, ATTENTION) for dtype, costs in document["attention"].items()},
            document["conditions"],
            document["measurements"],
        )
        hardware.gpu  # noqa: B018  what it refuses belongs to the file
        return hardware
    except OSError as error:
        raise PagedKVError(f"cannot read {path}: {error.strerror or error}") from None
    except KeyError as error:
        raise PagedKVError(f"{path}: no field {error.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PagedKVError(f"{path}: {error}") from None


def _figures(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Figure]:
    return {name: Figure(**values[name]) for name in names}
