"""Grid: options with several values each, and every combination of them as a point."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import PagedKVError

Setting = str | bool
"""The text of an option's value; for a flag, whether it is given."""

Point = dict[str, Setting]
"""Options by name, without dashes: what one replay is run with, besides the trace."""

MOST_POINTS: Final = 100_000


class Grid:
    """Axes in the order in which they were stated; the last one varies fastest.

    Raises ``PagedKVError`` for an axis without values or with one value twice, and for a grid of more than
    ``MOST_POINTS``.

    >>> grid = Grid({"block-size": ["16", "32"], "policy": ["lru", "arc"]})
    >>> len(grid), list(grid)[1]
    (4, {'block-size': '16', 'policy': 'arc'})
    """

    def __init__(self, axes: Mapping[str, Sequence[Setting]]) -> None:
        """Take options and their values."""
        self.axes = {name: tuple(values) for name, values in axes.items()}
        for name, values in self.axes.items():
            if not values:
                raise PagedKVError(f"--{name} has no value")
            for value in values:
                if values.count(value) > 1:
                    raise PagedKVError(f"--{name} states {value} {values.count(value)} times")
        if len(self) > MOST_POINTS:
            sizes = " x ".join(str(len(values)) for values in self.axes.values())
            raise PagedKVError(
                f"the grid has {sizes} = {len(self):,} points, at most {MOST_POINTS:,} are taken"
            )

    def __len__(self) -> int:
        """Return the number of points; 1 without axes."""
        return math.prod(len(values) for values in self.axes.values())

    def __iter__(self) -> Iterator[Point]:
        """Yield the points in order."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    @property
    def varying(self) -> list[str]:
        """Options with more than one value."""
        return [name for name, values in self.axes.items() if len(values) > 1]


def read_grid_file(path: str) -> dict[str, tuple[Setting, ...]]:
    """Axes from a TOML file, or a JSON one by its suffix: names of options, each with a value or a list.

    Underscores in names stand for dashes. Raises ``PagedKVError`` for a file that is missing, no TOML or
    JSON, or holds anything else than options and values.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "grid.toml")
    ...     _ = path.write_text('block-size = [16, 32]\\ngpu = "h100"\\nno-prefix-caching = [false, true]\\n')
    ...     read_grid_file(str(path))
    {'block-size': ('16', '32'), 'gpu': ('h100',), 'no-prefix-caching': (False, True)}
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PagedKVError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    document = _parse(path, text)
    if not isinstance(document, dict) or not document:
        raise PagedKVError(f"{path} holds no options: write, for example, block-size = [16, 32]")
    axes: dict[str, tuple[Setting, ...]] = {}
    for key, values in document.items():
        name = key.replace("_", "-")
        if name in axes:
            raise PagedKVError(f"{path}: {name} is there twice")
        listed = values if isinstance(values, list) else [values]
        axes[name] = tuple(_setting(f"{path}: {key}", value) for value in listed)
    return axes


def _parse(path: str, text: str) -> Any:
    try:
        return json.loads(text) if path.lower().endswith(".json") else _toml(text)
    except ValueError as error:  # of json and of tomllib, both
        raise PagedKVError(f"{path}: {error}") from None


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise PagedKVError('a grid in TOML needs tomli here: pip install "pagedkv[sweep]"') from None
    return tomllib.loads(text)


def _setting(where: str, value: object) -> Setting:
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise PagedKVError(f"{where}: {value!r} is no value of an option")
