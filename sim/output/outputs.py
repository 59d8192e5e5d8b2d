"""The files that commands write: checked before the work, put in place whole after it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import names_of

STANDARD_OUTPUT: Final = ("-", "/dev/stdout", "/dev/fd/1")
"""Names of standard output as a file to write."""

Writer = Callable[[Path], None]


def check_outputs(*reads: str | None, **paths: str | None) -> bool:
    """Tell whether an output goes to standard output, which then holds nothing else.

    Refuses what could not be written, before the work and not after it: a missing folder, a folder's name,
    no permission, two outputs in one place, and a file that the command ``reads``. The keywords are the
    names of the options.
    """
    taken: dict[str, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        place = "standard output" if path in STANDARD_OUTPUT else _checked_target(path)
        if any(_is_same_file(path, read) for read in reads if read is not None):
            raise PagedKVError(f"{names_of([name])} would overwrite {path}, which is read")
        if place in taken:
            raise PagedKVError(f"{names_of([taken[place]])} and {names_of([name])} would both write {place}")
        taken[place] = name
    return "standard output" in taken


def _is_same_file(path: str, other: str) -> bool:
    """Tell whether both name one regular file, through links too."""
    with _named(path):
        return (
            not is_stream(path)
            and os.path.isfile(other)
            and os.path.isfile(path)
            and os.path.samefile(path, other)
        )


def write_outputs(*outputs: tuple[str, Writer]) -> None:
    """Let each writer fill a temporary file, then put all in place; if one fails, no file has changed.

    A link stays a link, its target is replaced. What is no regular file (a pipe, a device, standard
    output) is written to. ``PagedKVError`` names the path as given.
    """
    reader_left: BrokenPipeError | None = None
    with ExitStack() as stack:
        filled = [(path, stack.enter_context(_filled(path, write))) for path, write in outputs]
        # Streams first, since they may fail: a full disk must change no file, a reader who left spoils none.
        for path, temporary in sorted(filled, key=lambda item: not is_stream(item[0])):
            try:
                with _named(path):
                    _put_in_place(path, temporary)
            except BrokenPipeError as error:
                reader_left = error
    if reader_left is not None:
        raise reader_left


def text_writer(text: str) -> Writer:
    """A writer of text: the same bytes on every system."""

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8", newline="\n")

    return write


def _checked_target(path: str) -> str:
    """The file that would be written, links followed."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    with _named(path):
        exists = _mode(path) is not None
    if os.path.isdir(target):
        raise PagedKVError(f"cannot write {path}: it is a folder")
    if not os.path.isdir(folder) and not exists:
        raise PagedKVError(f"cannot write {path}: no folder {folder}")
    if exists and not os.access(path, os.W_OK):
        raise PagedKVError(f"cannot write {path}: no permission to change it")
    if not is_stream(path) and not os.access(folder, os.W_OK | os.X_OK):
        raise PagedKVError(f"cannot write {path}: no permission to write into the folder {folder}")
    return target


def _mode(path: str) -> int | None:
    """Type and permissions of a file, links followed; None if there is none."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def is_stream(path: str) -> bool:
    """Tell whether a path names standard output, a pipe or a device: it is written to, and not replaced."""
    mode = _mode(path)
    return path in STANDARD_OUTPUT or (mode is not None and not stat.S_ISREG(mode))


@contextmanager
def _filled(path: str, write: Writer) -> Iterator[Path]:
    """A temporary file, filled, beside what it will replace; its suffix says the format of a picture."""
    folder = None if is_stream(path) else os.path.dirname(os.path.realpath(path))
    with _named(path):
        handle, name = tempfile.mkstemp(suffix=Path(path).suffix, prefix=".pagedkv-", dir=folder)
    os.close(handle)
    try:
        with _named(path):
            write(Path(name))
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _put_in_place(path: str, temporary: Path) -> None:
    if path in STANDARD_OUTPUT:
        sys.stdout.write(temporary.read_text(encoding="utf-8"))
        sys.stdout.flush()
    elif is_stream(path):
        with temporary.open("rb") as source, open(path, "wb") as stream:
            shutil.copyfileobj(source, stream)
    else:
        old_mode = _mode(path)
        temporary.chmod(0o666 & ~_umask() if old_mode is None else stat.S_IMODE(old_mode))
        temporary.replace(os.path.realpath(path))


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors of the system name the path as the user gave it, and no temporary file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise PagedKVError(f"cannot write {path}: {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
