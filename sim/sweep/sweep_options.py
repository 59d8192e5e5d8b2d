"""The options of a replay as axes of a sweep: a point is what ``pagedkv replay`` would be given."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NoReturn

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands import replay_command
from pagedkv.sim.commands.reading_options import add_reading_options
from pagedkv.sim.commands.replay_outputs import add_output_options
from pagedkv.sim.replay import ReplaySetup
from pagedkv.sim.sweep.grid import Point, Setting

NOT_FOR_SWEEPS: Final = (
    "help",
    "trace",
    "limit",
    "seed",
    "hits_only",
    "stream",
    "bound",
    "measure_attention",
)
"""Options of a replay that are not one point's own, or whose times differ from run to run."""


class _ReplayParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PagedKVError(message)


@cache
def _replay_parser() -> argparse.ArgumentParser:
    top: argparse.ArgumentParser = _ReplayParser()
    commands = top.add_subparsers()
    replay_command.add_parser(commands)
    parser: argparse.ArgumentParser = commands.choices["replay"]
    return parser


@cache
def point_options() -> dict[str, argparse.Action]:
    """Options of ``pagedkv replay`` that a point can have, by name without dashes."""
    others = argparse.ArgumentParser()
    add_output_options(others)
    add_reading_options(others)
    left_out = {action.dest for action in others._actions} | set(NOT_FOR_SWEEPS)
    actions = [action for action in _replay_parser()._actions if action.dest not in left_out]
    return {action.option_strings[0].removeprefix("--"): action for action in actions}


def is_flag(name: str) -> bool:
    """Whether an option takes no value."""
    return point_options()[name].nargs == 0


def add_axes(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """Add every option of a point, with one value or ``several``; ``axes`` of the namespace has the answers.

    That is a dict in the order of the command line, from names without dashes to texts, True for a flag.
    What the parser has already, it keeps.
    """
    values = ", each with one value or several" if several else ""
    group = parser.add_argument_group(f"options of `pagedkv replay`{values}")
    for name, action in point_options().items():
        if f"--{name}" in parser._option_string_actions:
            continue
        shown = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else None)
        group.add_argument(
            f"--{name}",
            dest="axes",
            action=_Axis,
            nargs=0 if is_flag(name) else "+" if several else 1,
            metavar=shown or action.dest.upper(),
            help=action.help,
        )
    parser.set_defaults(axes={})


class _Axis(argparse.Action):
    """Notes options in the order in which they are stated."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Note one option; refuse it the second time."""
        name = self.option_strings[0].removeprefix("--")
        if name in namespace.axes:
            raise argparse.ArgumentError(self, "stated twice: give it all values at once")
        # a new dict, since the default belongs to the parser
        namespace.axes = {**namespace.axes, name: tuple(values or (True,))}


def check_axes(axes: dict[str, tuple[Setting, ...]], where: str = "") -> None:
    """Refuse an option that a replay does not have or a sweep cannot vary, and values it does not take."""
    for name, values in axes.items():
        if name not in point_options():
            raise PagedKVError(f"{where}a sweep has no option --{name} (see pagedkv sweep --help)")
        for value in values:
            if isinstance(value, bool) != is_flag(name):
                wanted = "true or false" if is_flag(name) else "a value, not true or false"
                raise PagedKVError(f"{where}--{name} takes {wanted}, got {value}")
            try:
                parse_point({name: value})
            except PagedKVError as error:
                raise PagedKVError(f"{where}{error}") from None


def arguments_of(point: Point) -> list[str]:
    """A point as arguments of ``pagedkv replay``, after the trace.

    >>> arguments_of({"block-size": "16", "no-prefix-caching": True, "extrapolate": False})
    ['--block-size=16', '--no-prefix-caching']
    """
    stated: Iterable[tuple[str, Setting]] = point.items()
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in stated if value is not False
    ]


def parse_point(point: Point) -> argparse.Namespace:
    """The options as ``pagedkv replay`` would understand them."""
    return _replay_parser().parse_args(arguments_of(point))


def parse_axes(axes: dict[str, tuple[Setting, ...]]) -> argparse.Namespace:
    """Axes with one value each as one point. Raises ``PagedKVError`` for a value that a replay refuses."""
    return parse_point({name: values[0] for name, values in axes.items()})


def setup_of(args: argparse.Namespace) -> ReplaySetup:
    """What serves the trace. Raises ``PagedKVError`` if these options do not go together."""
    return replay_command._setup(args)
