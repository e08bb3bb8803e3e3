"""Chat templates in a separate process, because a template is a program of the checkpoint.

`python -P -m kvant.server.template_process SECONDS`. Frames on standard input and output: four bytes of
length, then msgpack. transformers' sandbox protects the system from a template; this process protects the
server's time and memory. It ends with its standard input, and when a template takes longer than SECONDS.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

_MEMORY = 640 * 2**20
"""Beside what the process has before it renders: room for the largest body, written out."""

OUTPUT_FACTOR, OUTPUT_BASE = 8, 2**20
"""A rendered conversation has at most 8 times its characters and a million more."""


class Render(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One conversation. variables: further values for the template, such as the special tokens."""

    template: str
    messages: tuple[dict[str, Any], ...]
    variables: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[dict[str, Any], ...] | None = None


class Rendered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text, or why there is none."""

    text: str | None
    fault: str | None = None


_requests = msgspec.msgpack.Decoder(Render)


def main(seconds: float) -> int:
    sys.modules["torch"] = None  # type: ignore[assignment] # transformers would import it
    from transformers.utils.chat_template_utils import render_jinja_template

    most = _virtual_memory() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    send(sink, b"")  # ready
    while (data := receive(source)) is not None:
        # No handler: the signal ends the process at any point.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = msgspec.msgpack.encode(_render(_requests.decode(data), render_jinja_template))
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(sink, answer)
    return 0


def _render(request: Render, render: Any) -> Rendered:
    try:
        (text,), _ = render(
            conversations=[list(request.messages)],
            tools=None if request.tools is None else list(request.tools),
            chat_template=request.template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.variables,
        )
    except MemoryError:
        return Rendered(None, "it needs too much memory")
    except Exception as fault:  # the template is a program and may raise anything
        return Rendered(None, str(fault)[:500] or type(fault).__name__)
    most = OUTPUT_FACTOR * len(str([*request.messages])) + OUTPUT_BASE
    if len(text) > most:
        return Rendered(None, f"it wrote {len(text)} characters, more than {most}")
    return Rendered(text)


def send(sink: BinaryIO, data: bytes) -> None:
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()


def receive(source: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = source.read(4)
    return source.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def _virtual_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
