"""Fetch a public trace once, checked against its known SHA-256."""

import hashlib
import http.client
import os
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagedkv.errors import PagedKVError

_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 30.0


class DownloadError(PagedKVError):
    """A trace that is unknown, cannot be fetched, or is not the file it should be."""


@dataclass(frozen=True)
class KnownTrace:
    """A public trace file: where it is, how to recognise it, and whom to thank."""

    file_name: str
    url: str
    sha256: str
    """Of the whole file, in lower-case hexadecimal digits."""
    num_bytes: int
    licence: str
    citation: str


KNOWN_TRACES = {
    "mooncake-conversation": KnownTrace(
        file_name="conversation_trace.jsonl",
        url=(
            "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28"
            "/FAST25-release/traces/conversation_trace.jsonl"
        ),
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        num_bytes=3_029_533,
        licence="Apache-2.0",
        citation='Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025',
    ),
}
"""The traces that `download` knows, by name."""


def download(
    name: str,
    directory: str | os.PathLike[str],
    *,
    url: str | None = None,
    opener: Callable[..., Any] = urllib.request.urlopen,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the path of a known trace in ``directory``, fetched if it is not there yet.

    A file that is there with the right hash is returned without any network access; a different file of that
    name is replaced. The new file appears complete and checked or not at all: an error or an interrupt leaves
    nothing behind but the directory, which is made where missing. O(size of the file).

    Args:
        name: a key of ``KNOWN_TRACES``.
        directory: where the file shall be.
        url: a mirror to use instead of the public address (http or https).
        opener: called with (url, timeout=seconds), as ``urllib.request.urlopen`` is.
        progress: called now and then with (bytes done, bytes in all).

    Raises:
        DownloadError: an unknown name, no network, an HTTP error, or a file of another size or hash.

    >>> download("conversation", ".")
    Traceback (most recent call last):
    pagedkv.sim.download.DownloadError: unknown trace 'conversation', known are: mooncake-conversation
    """
    if name not in KNOWN_TRACES:
        raise DownloadError(f"unknown trace {name!r}, known are: {', '.join(KNOWN_TRACES)}")
    trace = KNOWN_TRACES[name]
    address = trace.url if url is None else url
    _check_address(address)
    path = Path(directory, trace.file_name)
    with _as_download_errors(name, address):
        if not _is_there(path, trace):
            with opener(address, timeout=_TIMEOUT_S) as response:
                _store(response, path, trace, progress)
    return path


def _check_address(address: str) -> None:
    try:
        scheme = urllib.parse.urlsplit(address).scheme
    except ValueError as error:
        raise DownloadError(f"url {address!r} is malformed: {error}") from error
    if scheme not in ("http", "https"):
        raise DownloadError(f"url must begin with http:// or https://, got {address!r}")


@contextmanager
def _as_download_errors(name: str, address: str) -> Iterator[None]:
    """Turn what networks and file systems raise into one line."""
    try:
        yield
    except DownloadError as error:
        raise DownloadError(f"{name} from {address}: {error}") from error
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{name} from {address}: HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DownloadError(f"{name} from {address}: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{name} from {address}: {error or type(error).__name__}") from error


def _is_there(path: Path, trace: KnownTrace) -> bool:
    if not path.is_file() or path.stat().st_size != trace.num_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == trace.sha256


def _store(
    response: BinaryIO, path: Path, trace: KnownTrace, progress: Callable[[int, int], None] | None
) -> None:
    """Copy the response to a file beside ``path``, check it, and move it there in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            _copy(response, file, trace, progress)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _copy(
    response: BinaryIO, file: BinaryIO, trace: KnownTrace, progress: Callable[[int, int], None] | None
) -> None:
    digest, done = hashlib.sha256(), 0
    while chunk := response.read(_CHUNK_BYTES):
        done += len(chunk)
        if done > trace.num_bytes:
            raise DownloadError(f"more than the expected {trace.num_bytes} bytes")
        file.write(chunk)
        digest.update(chunk)
        if progress:
            progress(done, trace.num_bytes)
    if done < trace.num_bytes:
        raise DownloadError(f"ended after {done} of {trace.num_bytes} bytes")
    if digest.hexdigest() != trace.sha256:
        raise DownloadError(f"SHA-256 is {digest.hexdigest()}, expected {trace.sha256}")
