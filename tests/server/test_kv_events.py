"""Events of the prefix cache as a router's indexer reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvant.errors import BadValue, NotServable
from kvant.kv.events import EventsConfig, PageLog, parse_events
from kvant.kv.pages import page_hash
from kvant.sampling.sampling_params import SamplingParams
from kvant.server.kv_events import KEPT, EventPublisher
from tests.engine.fakes import finish, make_engine
from tests.server.harness import Server, build_model

PAGE = 4


class Indexer:
    """Follows a publisher, and knows by hash what each page holds and which page it follows."""

    def __init__(self, endpoint: str, replay: str) -> None:
        context = zmq.Context.instance()
        self.sub = context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.subscribe(b"kv@pod")
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.connect(replay)
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        time.sleep(0.2)  # a subscription travels

    def read(self) -> None:
        while self.sub.poll(200):
            topic, number, payload = self.sub.recv_multipart()
            assert topic == b"kv@pod"
            self.numbers.append(int.from_bytes(number, "big"))
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.pages.clear()
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU"
            for found in event["block_hashes"]:
                del self.pages[found]
        else:
            assert event["type"] == "BlockStored"
            assert event["block_size"] == PAGE
            assert (event["lora_id"], event["lora_name"]) == (None, None)
            parent, tokens = event["parent_block_hash"], event["token_ids"]
            assert len(tokens) == PAGE * len(event["block_hashes"])
            assert parent is None or parent in self.pages
            for place, found in enumerate(event["block_hashes"]):
                page = tuple(tokens[place * PAGE : (place + 1) * PAGE])
                self.pages[found] = parent, page
                parent = found

    def ask(self, publisher: EventPublisher, first: int) -> list[tuple[int, bytes]]:
        """Messages from number `first` on."""
        self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        time.sleep(0.2)
        publisher.publish()
        found = []
        while True:
            _, number, payload = self.dealer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), payload))


@pytest.fixture
def places(tmp_path: Path) -> EventsConfig:
    return EventsConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", "kv@pod")


@pytest.fixture
def published(places: EventsConfig) -> Iterator[tuple[Any, EventPublisher, Indexer]]:
    engine, _ = make_engine(num_pages=12, page_size=PAGE, max_num_seqs=2)
    log = PageLog()
    engine.scheduler.allocator.log = log
    publisher = EventPublisher(places, log, PAGE)
    indexer = Indexer(places.endpoint, places.replay)
    yield engine, publisher, indexer
    publisher.close()
    indexer.sub.close(0)
    indexer.dealer.close(0)


def test_an_indexer_knows_what_the_cache_holds(
    published: tuple[Any, EventPublisher, Indexer],
) -> None:
    engine, publisher, indexer = published
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for turn in range(6):  # more than the pool holds: pages are evicted
        engine.submit([4 + turn] * 9 + [20, 21, 22, 23], params)
        finish(engine, publisher.publish)
        publisher.publish()
    indexer.read()
    allocator = engine.scheduler.allocator
    known = {int.from_bytes(digest[-8:], "big") for digest in allocator.groups[0]._page_of}
    assert set(indexer.pages) == known
    assert len(known) < 6 * 3
    assert indexer.numbers == list(range(len(indexer.numbers)))
    for parent, tokens in indexer.pages.values():
        assert parent is None or parent in known or parent not in indexer.pages
        assert len(tokens) == PAGE
    engine.scheduler.allocator.forget_all()
    publisher.publish()
    indexer.read()
    assert indexer.pages == {}


def test_salted_pages_are_never_published(published: tuple[Any, EventPublisher, Indexer]) -> None:
    engine, publisher, indexer = published
    engine.submit([7] * 12, SamplingParams(temperature=0, max_tokens=2), salt="of a client")
    finish(engine)
    engine.scheduler.allocator.forget_all()
    publisher.publish()
    indexer.read()
    assert engine.scheduler.allocator.log is not None
    assert indexer.pages == {}
    assert indexer.numbers in ([0], [])  # that everything was cleared at the start


def test_earlier_messages_can_be_asked_for(
    published: tuple[Any, EventPublisher, Indexer],
) -> None:
    engine, publisher, indexer = published
    for turn in range(3):
        engine.submit([4 + turn] * 9, SamplingParams(temperature=0, max_tokens=2))
        finish(engine)
        publisher.publish()
    late = indexer.ask(publisher, 1)
    assert [number for number, _ in late] == list(range(1, 3))
    indexer.dealer.send_multipart((b"no", b"protocol", b"at all"))
    for _, payload in indexer.ask(publisher, 0):
        indexer.apply(payload)
    known = {int.from_bytes(d[-8:], "big") for d in engine.scheduler.allocator.groups[0]._page_of}
    assert set(indexer.pages) == known
    assert KEPT == 10_000


@pytest.mark.slow
def test_a_server_publishes_the_pages_of_requests_without_keys(
    places: EventsConfig, tmp_path: Path
) -> None:
    model = build_model(tmp_path)
    flags = ("--page-size", str(PAGE), "--kv-events",
             f"{places.endpoint},replay={places.replay},topic={places.topic}")  # fmt: skip
    with Server(model, flags) as server:
        indexer = Indexer(places.endpoint, places.replay)
        tokens = server.post("/tokenize", {"prompt": "The sea, the sea"}).json["tokens"]
        assert server.complete("The sea, the sea", max_tokens=6).status == 200
        indexer.read()
        text: list[int] = []
        for _, page in indexer.pages.values():  # in the order of the prompt
            text += page
        assert text[:12] == tokens[:12]
        indexer.sub.close(0)
        indexer.dealer.close(0)
    with Server(model, (*flags, "--api-key", "k"), key="k") as server:
        indexer = Indexer(places.endpoint, places.replay)
        assert server.complete("The sea, the sea", max_tokens=6).status == 200
        indexer.read()
        assert indexer.pages == {}
        indexer.sub.close(0)
        indexer.dealer.close(0)


def test_hashes_are_those_of_the_pages() -> None:
    log = PageLog()
    digest = page_hash(b"\0" * 32, [1, 2, 3, 4])
    log.stored(digest, None, [1, 2, 3, 4])
    log.removed(b"\1" * 32)  # was never told
    (event,) = log.take()
    assert event.digest == digest  # type: ignore[union-attr]
    assert log.take() == []


def test_places_are_read_and_checked(places: EventsConfig) -> None:
    assert parse_events(
        "tcp://127.0.0.1:5557,replay=ipc:///tmp/r,topic=kv@a", asked_by="--kv-events"
    ) == EventsConfig("tcp://127.0.0.1:5557", "ipc:///tmp/r", "kv@a")
    for wrong in ("5557", "", "tcp://127.0.0.1:5557,again=1", "tcp://h:1,replay=h:2"):
        with pytest.raises(BadValue, match="--kv-events"):
            parse_events(wrong, asked_by="--kv-events")
    with pytest.raises(NotServable, match="cannot publish"):
        EventPublisher(EventsConfig("ipc:///nowhere/at/all"), PageLog(), PAGE)
