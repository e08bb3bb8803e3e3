"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first complete stop string, and holds back text that may begin one.

    The cut of the text into pieces does not change the result. If two are complete at the same
    character, the one that begins earlier counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be shown now: after a match, everything up to it, then nothing."""
        if self.found is not None:
            return ""
        text = self._held + text
        first = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if first is not None:
            end, at, self.found = first
            self._held = ""
            return text[: end if self._include else at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def release(self) -> str:
        """End the text; return what was held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
