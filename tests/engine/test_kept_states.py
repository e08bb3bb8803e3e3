"""Kept states of recurrent layers: a long prompt gives up places of its own, never another one's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvant.kv.pages import PageAllocator, Superblocks
from kvant.scheduling.kept_states import KeptStates
from kvant.scheduling.request import FinishReason

PAGE, STRIDE = 16, 2048


def made(most: int, num_pages: int = 1000) -> tuple[KeptStates, PageAllocator]:
    pages = PageAllocator(Superblocks(num_pages + 1))
    return KeptStates(pages, most, stride=STRIDE, page_size=PAGE), pages


def prompt(name: str, length: int, *, shared: int = 0, by: str = "") -> Any:
    """A prompt of `length` tokens whose first `shared` tokens are those of the prompt `by`."""
    hashes = [b""] + [
        f"{by if (n + 1) * PAGE <= shared else name} {n}".encode()
        for n in range((length - 1) // PAGE)
    ]
    return SimpleNamespace(
        prefix_hashes=hashes,
        num_prompt_tokens=length,
        number=hash(name) % 1000,
        num_cached_tokens=None,
    )


def run(states: KeptStates, one: Any, piece: int = 8192) -> int:
    """Computes a prompt in pieces of at most `piece` tokens; returns the tokens that it continued from."""
    start = len(states.reach(one, list(range(len(one.prefix_hashes) - 1)))) * PAGE
    states.use(one, start // PAGE)
    found, one.num_cached_tokens = start, None
    while start < one.num_prompt_tokens:
        count = states.room(one, start, min(piece, one.num_prompt_tokens - start))
        one.num_cached_tokens = found
        start += count
        states.keep(one, start)
        assert not states.audit()
    return found


def end(length: int) -> int:
    """Where a prompt's last state is kept."""
    last = (length - 1) // PAGE * PAGE
    return last if last % STRIDE >= 128 or not last % STRIDE else last // STRIDE * STRIDE


def test_two_prompts_of_30000_tokens_take_turns_and_both_hit() -> None:
    states, _ = made(16)
    a, b = prompt("a", 30000), prompt("b", 30000)
    assert [run(states, one) for one in (a, b)] == [0, 0]
    for _ in range(3):
        assert [run(states, one) for one in (a, b)] == [end(30000)] * 2
    assert states.num_kept == 16


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(300, 40000), min_size=1, max_size=6), more=st.integers(0, 12))
def test_as_many_prompts_as_states_keep_their_ends(lengths: list[int], more: int) -> None:
    states, _ = made(len(lengths) + more)
    prompts = [prompt(str(i), n) for i, n in enumerate(lengths)]
    for one in prompts:
        run(states, one)
    assert [run(states, one) for one in prompts] == [end(n) for n in lengths]


@settings(max_examples=30, deadline=None)
@example(length=4113, piece=1)
@given(length=st.integers(300, 5000), piece=st.integers(1, 300))
def test_a_prompt_keeps_its_end_in_pieces_of_any_length(length: int, piece: int) -> None:
    states, _ = made(8)
    one = prompt("a", length)
    last = (length - 1) // PAGE * PAGE
    # A piece that happens to end at the last whole page keeps that state too, which is nearer.
    kept = last if last % STRIDE % piece == 0 else end(length)
    assert [run(states, one, piece) for _ in range(2)] == [0, kept]


def test_a_prompt_that_goes_on_shortly_behind_a_kept_state_is_not_cut() -> None:
    states, _ = made(8)
    run(states, prompt("a", 1000))
    longer = prompt("b", 1100, shared=992, by="a")
    assert run(states, longer, piece=64) == 992
    assert run(states, longer) == 992, "its end is less than 128 tokens behind"


@settings(max_examples=30, deadline=None)
@given(length=st.integers(9000, 120000), share=st.floats(0, 1), most=st.integers(8, 20))
def test_places_grow_apart_towards_the_beginning(length: int, share: float, most: int) -> None:
    """A prompt that parts from another at any place computes at most twice what the other had left there."""
    states, _ = made(most)
    run(states, prompt("a", length))
    shared = int(share * end(length))
    found = run(states, prompt("b", length, shared=shared, by="a"))
    assert found <= shared
    assert shared - found <= 2 * (end(length) - shared) + STRIDE


def test_places_where_prompts_parted_outlive_ends() -> None:
    """A common beginning stays, however many prompts go on from it once."""
    states, _ = made(6)
    base = prompt("base", 9000)
    run(states, base)
    assert run(states, prompt("0", 12000, shared=9000, by="base")) == end(9000)
    for i in range(1, 30):
        one = prompt(str(i), 12000, shared=9000, by="base")
        assert run(states, one) == end(9000)


def test_evicted_pages_and_dropped_states_leave_the_tree_whole() -> None:
    states, pages = made(12, num_pages=12)
    a, b = prompt("a", 20000), prompt("b", 20000, shared=10000, by="a")
    run(states, a)
    run(states, b)
    held = pages.allocate(9)  # running sequences take the oldest
    assert held is not None
    assert not states.audit()
    assert states.num_kept == 3
    states.forget(b, FinishReason.CANCELLED)
    assert not states.audit()
    pages.release(held)
    run(states, a)
    assert run(states, a) == end(20000)
