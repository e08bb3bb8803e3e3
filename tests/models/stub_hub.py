"""A hub on loopback: the few routes a download uses, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class StubHub:
    """What the stub serves, and what it was asked.

    files: by commit, then name. refs: branch to commit. status, error_code: answer to everything
    when status is not 200. token: the only accepted one, None for public. breaks: by file, how often
    a transfer ends half way. fail_once: by file, the status its first transfer is refused with.
    claimed_sizes: by file, what the listing says instead of the truth.
    """

    files: dict[str, dict[str, bytes]]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    status: int = 200
    error_code: str | None = None
    token: str | None = None
    breaks: dict[str, int] = field(default_factory=dict)
    fail_once: dict[str, int] = field(default_factory=dict)
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> list[str]:
        """Files whose content was sent, in order, with repetitions."""
        return [
            path.split("/")[-1] for method, path, _ in self.requests if self._is_file(method, path)
        ]

    def ranges(self, name: str) -> list[str | None]:
        return [r for m, p, r in self.requests if self._is_file(m, p) and p.endswith("/" + name)]

    @staticmethod
    def _is_file(method: str, path: str) -> bool:
        return method == "GET" and "/resolve/" in path


@contextmanager
def serve(hub: StubHub) -> Iterator[StubHub]:
    """Serve `hub` on 127.0.0.1 until the block ends; hub.url is its address."""

    class Handler(_Handler):
        stub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stub: StubHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def log_message(self, format: str, *args: object) -> None: ...

    def _answer(self, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.stub.requests.append((self.command, path, self.headers.get("Range")))
        if self.stub.status != 200:
            return self._refuse(self.stub.status, self.stub.error_code)
        given = self.headers.get("Authorization")
        if self.stub.token is not None and given != f"Bearer {self.stub.token}":
            return self._refuse(401, "RepoNotFound")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._model_info(parts[5] if len(parts) > 5 else "main")
        if len(parts) > 4 and parts[2] == "resolve":
            return self._file(parts[3], "/".join(parts[4:]), send_body)
        return self._refuse(404, None)

    def _commit(self, revision: str) -> str | None:
        commit = self.stub.refs.get(revision, revision)
        return commit if commit in self.stub.files else None

    def _model_info(self, revision: str) -> None:
        commit = self._commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = self.stub.files[commit]
        sizes = {name: len(data) for name, data in files.items()} | self.stub.claimed_sizes
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        info = {"id": "owner/model", "modelId": "owner/model", "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _file(self, revision: str, name: str, send_body: bool) -> None:
        commit = self._commit(revision)
        data = self.stub.files.get(commit or "", {}).get(name)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        if send_body and self.stub.fail_once.get(name):
            return self._refuse(self.stub.fail_once.pop(name), None)
        headers = {
            "X-Repo-Commit": str(commit),
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        wanted = self.headers.get("Range")
        if wanted is not None and send_body:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        cut = len(body) // 2 if send_body and self._breaks(name) else None
        self._send(status, body, headers, send_body=send_body, cut=cut)

    def _breaks(self, name: str) -> bool:
        left = self.stub.breaks.get(name, 0)
        self.stub.breaks[name] = max(0, left - 1)
        return left > 0

    def _refuse(self, status: int, code: str | None) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        send_body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send_body:
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
