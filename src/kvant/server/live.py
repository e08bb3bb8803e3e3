"""The web page at /, and the current state of the cache that it shows."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from importlib import resources
from typing import TYPE_CHECKING

from kvant.kv.groups import STATES
from kvant.kv.pages import GroupPages
from kvant.look import stylesheet
from kvant.server import wire
from kvant.server.metrics import numbers_of

if TYPE_CHECKING:
    from kvant.server.service import Service


def live_of(service: Service) -> wire.Live:
    """Returns the current numbers of the cache and its requests."""
    supervisor, activity = service.supervisor, service.activity
    stats, ready, drafts = supervisor.stats, supervisor.ready, supervisor.stats.speculation
    loading = supervisor.loading
    shown = None
    if drafts is not None:
        length = drafts.num_emitted_tokens / drafts.num_drafts if drafts.num_drafts else 0.0
        shown = wire.LiveDrafts(drafts.num_draft_tokens, drafts.num_accepted_tokens, length)
    return wire.Live(
        status="draining" if service.draining else supervisor.state.value,
        phase=None if loading is None else loading.task,
        fraction=None if loading is None else loading.fraction,
        model=service.config.served_names[0],
        fingerprint=None if ready is None else ready.fingerprint,
        seconds=time.monotonic(),
        running=stats.num_running,
        waiting=stats.num_waiting,
        pages=wire.LivePages(
            stats.num_held_pages,
            stats.num_idle_pages,
            stats.num_usable_pages,
            0 if ready is None else ready.page_size,
            [
                wire.LiveGroup(_kept(one), one.held, one.shared, one.idle, one.usable)
                for one in stats.groups
            ],
        ),
        prompt_tokens=activity.prompt_tokens,
        cached_tokens=activity.cached_tokens,
        generated=activity.generated,
        drafts=shown,
        requests=[*map(numbers_of, activity.running.values()), *activity.ended],
    )


def _kept(group: GroupPages) -> str:
    if group.window == STATES:
        return "recurrent states"
    if group.window is None:
        return "every token"
    first = f"first {group.sink:,} and " if group.sink else ""
    return f"{first}last {group.window:,} tokens"


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers. The policy allows its own script and style, by their hashes."""
    data = resources.files("kvant.server").joinpath("page.html").read_bytes()
    data = data.replace(b"/* kvant.look */", stylesheet().encode())
    allowed = {tag: _hash(data, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return data, headers


def _hash(data: bytes, tag: str) -> str:
    """Returns the hash of the page's one element `tag`, as a content security policy writes it."""
    (inside,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), data, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
    return f"'sha256-{digest}'"
