"""Clients that never finish sending, in one thread on raw sockets, so that they cost the machine little.

`python -S tests/server/slow_client.py PORT EACH SECONDS` keeps so many connections that trickle a header
and as many that trickle a body, a byte a second; a closed one reconnects. Prints, for each kind, how
many were closed and how long the most patient one was kept, as JSON. Standard library only.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
STARTS = {"header": HEAD, "body": HEAD + b"Content-Length: 500\r\n\r\n{"}


def trickle(port: int, each: int, seconds: float) -> dict[str, dict[str, float]]:
    selector = selectors.DefaultSelector()
    born: dict[socket.socket, tuple[float, str]] = {}
    found = {kind: {"closed": 0.0, "longest": 0.0} for kind in STARTS}

    def come(kind: str) -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        sock.sendall(STARTS[kind])
        selector.register(sock, selectors.EVENT_READ)
        born[sock] = time.perf_counter(), kind

    def leave(sock: socket.socket) -> str:
        selector.unregister(sock)
        sock.close()
        since, kind = born.pop(sock)
        found[kind]["closed"] += 1
        found[kind]["longest"] = max(found[kind]["longest"], time.perf_counter() - since)
        return kind

    started = last = time.perf_counter()
    for kind in STARTS:
        for _ in range(each):
            come(kind)
    while born:
        coming = time.perf_counter() < started + seconds  # then wait until all have been closed
        gone = []
        for key, _ in selector.select(0.1):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                closed = not sock.recv(4096)
            except ConnectionResetError:
                closed = True
            if closed:
                gone.append(leave(sock))
        if time.perf_counter() - last >= 1.0:
            last = time.perf_counter()
            for sock in list(born):
                try:
                    sock.send(b"x")
                except OSError:
                    gone.append(leave(sock))
        if coming:
            for kind in gone:
                come(kind)
    return found


if __name__ == "__main__":
    port, each, seconds = sys.argv[1:]
    print(json.dumps(trickle(int(port), int(each), float(seconds))))
