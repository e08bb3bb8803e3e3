"""One request's progress as an iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvant.engine.result import Progress


class TokenStream(Iterator[Progress]):
    """Yields what each step adds to one request, and steps the engine when there is nothing yet.

    Any caller that steps the engine fills it, so several can be read in turn without loss. The last piece
    carries the result, or is a RequestError where that is a refusal. Closing it, or dropping it,
    cancels what is not finished.
    """

    def __init__(self, step: Callable[[], object], close: Callable[[], object]) -> None:
        self._step = step
        self._close = close
        self._pieces: deque[Progress] = deque()
        self._ended = False

    def put(self, piece: Progress) -> None:
        """Add a piece; the engine calls this."""
        self._pieces.append(piece)

    def __next__(self) -> Progress:
        if self._ended:
            raise StopIteration
        try:
            while not self._pieces:
                self._step()
        except BaseException:
            self.close()
            raise
        piece = self._pieces.popleft()
        if piece.result is not None:
            self._ended = True
            if piece.result.error is not None:
                raise piece.result.error
        return piece

    def close(self) -> None:
        """Cancel the request if it has not finished; nothing more is yielded."""
        if not self._ended:
            self._ended = True
            self._close()

    def __del__(self) -> None:
        self.close()
