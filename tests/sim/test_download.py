"""Downloads, against a server on the loopback interface."""

import hashlib
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.sim.download import KNOWN_TRACES, DownloadError, KnownTrace, download

BODY = bytes(range(256)) * 1000
# no proxy of the surroundings may stand between the test and its server
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Handler(BaseHTTPRequestHandler):
    """Answers by path, and counts in the server's ``requests``."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
            return
        body = {"/good": BODY, "/wrong": BODY[:-1] + b"?", "/long": BODY + b"?", "/short": BODY[:-9]}.get(
            self.path, BODY[:1000]
        )
        if self.path == "/absent":
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY) if self.path == "/cut" else len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.requests = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.fixture
def fetch(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """A function that downloads the known trace "demo" from a path of the server."""
    digest = hashlib.sha256(BODY).hexdigest()
    demo = KnownTrace("demo.jsonl", "http://127.0.0.1:1/unused", digest, len(BODY), "none", "nobody")
    monkeypatch.setitem(KNOWN_TRACES, "demo", demo)

    def fetch_from(path: str, **options: Any) -> Path:
        url = f"http://127.0.0.1:{server.server_port}{path}"
        return download("demo", tmp_path, url=url, **{"opener": OPEN, **options})

    return fetch_from


def left_over(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("path", ["/good", "/moved"])
def test_a_good_file_arrives_complete(fetch: Callable[..., Path], tmp_path: Path, path: str) -> None:
    assert fetch(path).read_bytes() == BODY
    assert left_over(tmp_path) == ["demo.jsonl"]


def test_a_file_that_is_there_is_not_fetched_again(
    fetch: Callable[..., Path], server: ThreadingHTTPServer
) -> None:
    first = fetch("/good")
    assert fetch("/good", opener=None) == first
    assert server.requests == ["/good"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [b"short", BODY[:-1] + b"?"])
def test_a_different_file_of_that_name_is_replaced(
    fetch: Callable[..., Path], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "demo.jsonl").write_bytes(content)
    assert fetch("/good").read_bytes() == BODY


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/wrong", "SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}"),
        ("/long", "more than the expected 256000 bytes"),
        ("/short", "ended after 255991 of 256000 bytes"),
        ("/cut", "ended after 1000 of 256000 bytes|IncompleteRead"),
        ("/absent", "HTTP 404 Not Found"),
    ],
)
def test_a_wrong_answer_is_one_line_and_leaves_nothing(
    fetch: Callable[..., Path], tmp_path: Path, path: str, message: str
) -> None:
    with pytest.raises(DownloadError, match=f"^demo from http://127.0.0.1:.*{path}: .*({message})") as error:
        fetch(path)
    assert "\n" not in str(error.value)
    assert left_over(tmp_path) == []


def test_a_failed_download_keeps_the_file_that_was_there(fetch: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "demo.jsonl").write_bytes(b"older")
    with pytest.raises(DownloadError):
        fetch("/wrong")
    assert (tmp_path / "demo.jsonl").read_bytes() == b"older"
    assert left_over(tmp_path) == ["demo.jsonl"]


def test_an_interrupt_passes_through_and_leaves_nothing(fetch: Callable[..., Path], tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        assert left_over(tmp_path) != []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("/good", progress=interrupt)
    assert left_over(tmp_path) == []


def test_progress_counts_up_to_the_whole_file(fetch: Callable[..., Path]) -> None:
    calls: list[tuple[int, int]] = []
    fetch("/good", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(BODY), len(BODY))
    assert calls == sorted(set(calls))


def test_a_missing_directory_is_made_once_an_answer_came(
    server: ThreadingHTTPServer, fetch: Callable[..., Path], tmp_path: Path
) -> None:
    folder, url = tmp_path / "a" / "b", f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(DownloadError):
        download("demo", folder, url=url + "/absent", opener=OPEN)
    assert left_over(tmp_path) == []
    assert download("demo", folder, url=url + "/good", opener=OPEN).parent == folder


def test_no_network_is_an_error_with_its_reason(fetch: Callable[..., Path], tmp_path: Path) -> None:
    del fetch
    with pytest.raises(DownloadError, match=r"demo from http://127\.0\.0\.1:1/unused: .*refused"):
        download("demo", tmp_path, opener=OPEN)


def test_a_timeout_is_an_error(fetch: Callable[..., Path]) -> None:
    def slow(url: str, timeout: float) -> Any:
        assert timeout > 0
        raise TimeoutError("timed out")

    with pytest.raises(DownloadError, match="timed out"):
        fetch("/good", opener=slow)


def test_a_target_that_is_a_directory_is_an_error(fetch: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "demo.jsonl").mkdir()
    with pytest.raises(DownloadError, match=r"demo\.jsonl"):
        fetch("/good")
    assert left_over(tmp_path) == ["demo.jsonl"]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://host/file", "", "conversation.jsonl"])
def test_only_http_addresses_are_opened(tmp_path: Path, url: str) -> None:
    with pytest.raises(DownloadError, match="url must begin with http"):
        download("mooncake-conversation", tmp_path, url=url)


@pytest.mark.parametrize("url", ["http://[", "http://", "http://127.0.0.1:port/", "http://127.0.0.1/a b"])
def test_an_address_that_is_no_url_is_an_error(tmp_path: Path, url: str) -> None:
    with pytest.raises(DownloadError, match="http://"):
        download("mooncake-conversation", tmp_path, url=url, opener=OPEN)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PagedKVError, match="unknown trace 'mooncake', known are: mooncake-conversation"):
        download("mooncake", tmp_path)


def test_known_traces_are_pinned_to_a_commit_and_a_hash() -> None:
    trace = KNOWN_TRACES["mooncake-conversation"]
    assert "/3b5a594" in trace.url and trace.url.endswith(trace.file_name)
    assert len(trace.sha256) == 64 and trace.num_bytes == 3_029_533
    assert trace.licence == "Apache-2.0" and "Mooncake" in trace.citation
