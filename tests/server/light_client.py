"""Many clients in one thread, on raw sockets: so cheap that what it measures is the server.

`python -S tests/server/light_client.py PORT CLIENTS SECONDS PAUSE` sends completions on kept
connections, one after the other on each, beginning within PAUSE seconds and with about PAUSE seconds
after a 429; prints counts by status and the seconds that a 429 takes (median, 99 of 100, worst) as
JSON. Standard library only; parses no more than it needs.
"""

from __future__ import annotations

import heapq
import json
import random
import selectors
import socket
import sys
import time

BODY = json.dumps({"prompt": "abc", "max_tokens": 64, "ignore_eos": True}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def load(port: int, clients: int, seconds: float, pause: float) -> dict[str, object]:
    selector = selectors.DefaultSelector()
    received: dict[socket.socket, bytes] = {}
    sent: dict[socket.socket, float] = {}
    resting: list[tuple[float, int, socket.socket]] = []
    counts: dict[str, int] = {}
    refused: list[float] = []
    chance = random.Random(0).random

    def ask(sock: socket.socket) -> None:
        received[sock] = b""
        sent[sock] = time.perf_counter()
        sock.sendall(REQUEST)

    started = time.perf_counter()
    for _ in range(clients):
        sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        selector.register(sock, selectors.EVENT_READ)
        received[sock] = b""
        resting.append((started + 1 + pause * chance(), id(sock), sock))
    heapq.heapify(resting)
    while (now := time.perf_counter()) < started + seconds:
        while resting and resting[0][0] <= now:
            ask(heapq.heappop(resting)[2])
        wait = resting[0][0] - now if resting else 0.1
        for key, _ in selector.select(min(wait, 0.1)):
            sock = key.fileobj  # type: ignore[assignment]
            part = sock.recv(65536)
            now = time.perf_counter()
            received[sock] += part
            head, found, body = received[sock].partition(b"\r\n\r\n")
            if part and not found:
                continue
            if part and len(body) < int(head.lower().split(b"content-length:")[1].split()[0]):
                continue
            status = head.split()[1].decode() if part else "cut"
            counts[status] = counts.get(status, 0) + 1
            if status == "429":
                refused.append(now - sent[sock])
                heapq.heappush(resting, (now + pause * (0.5 + chance()), id(sock), sock))
            elif status == "200":
                ask(sock)
            else:
                selector.unregister(sock)
    for sock in received:
        sock.close()
    refused.sort()
    at = {name: refused[int(len(refused) * share)] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {"counts": counts, "refused": {**at, "worst": refused[-1]}}


if __name__ == "__main__":
    port, clients, seconds, pause = sys.argv[1:]
    print(json.dumps(load(int(port), int(clients), float(seconds), float(pause))))
