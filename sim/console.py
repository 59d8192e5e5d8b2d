"""The terminal: tables, notes, and a progress bar that is silent when nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pagedkv.errors import PagedKVError

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise PagedKVError('the command line needs rich: pip install "pagedkv[cli]"') from None

NARROWEST = 100
"""Columns of output that is not a terminal, so that a redirected table is not cut to 80."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1; the command line has one answer for all output


def console(stderr: bool = False) -> Console:
    """A console on standard output or error."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(file=stream, width=None if stream.isatty() else NARROWEST, highlight=False)


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Print a table, the first column left and the others right, and notes below it."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, because rich takes [ms] in a string for markup
    out = console()
    out.print(title, style="bold", markup=False, soft_wrap=True)
    out.print(table)
    for note in notes:
        out.print(note, style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes how much is done; shows a bar on a terminal, nothing elsewhere.

    ``total`` is None if nobody knows.
    """
    err = console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        step = max(1, (total or 100_000) // 200)
        shown = 0

        def update(done: int) -> None:
            nonlocal shown
            # Every request would cost more than the replay itself.
            if done - shown >= step or done == total:
                bar.update(task, completed=done)
                shown = done

        yield update


def human_bytes(count: float) -> str:
    """Bytes in binary units.

    >>> human_bytes(131072), human_bytes(65_536_000)
    ('128.0 KiB', '62.5 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count:,.0f} B"
        count /= 1024
    return f"{count:,.1f} TiB"
