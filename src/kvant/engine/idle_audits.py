"""What an engine looks at while it has nothing to do: who owns its pages, and then its scales."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvant.errors import EngineFault

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

AFTER_SECONDS = 1.0
"""An engine without work for so long checks who owns its pages, and from then on some scales each time."""

_MOST_SHOWN = 20
_log = logging.getLogger(__name__)


class IdleAudits:
    """Whoever steps an engine says when it worked, and calls `rest` now and then while there is no work.

    Counts of audits and of what they found; findings are logged as errors.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_work = self._last_scales = 0.0
        self._audited = True
        self.num_audits = self.num_audit_faults = 0
        self.num_scale_audits = self.num_scale_faults = 0

    def worked(self) -> None:
        self._audited, self._last_work = False, time.monotonic()

    def rest(self) -> None:
        """Some milliseconds at most; nothing before the engine has rested for a while."""
        now = time.monotonic()
        if now - self._last_work <= AFTER_SECONDS:
            return
        if not self._audited:
            self._audit_pages()
        elif now - self._last_scales > AFTER_SECONDS:
            self._last_scales = now
            self._audit_scales()

    def _audit_pages(self) -> None:
        """Once after each time of work: every page has the owners that it should have."""
        self._audited = True
        self.num_audits += 1
        try:
            self._engine.audit()
        except EngineFault:
            self.num_audit_faults += 1
            _log.exception("the audit of an idle engine failed")

    def _audit_scales(self) -> None:
        found = self._engine.audit_scales()
        self.num_scale_audits += 1
        self.num_scale_faults += len(found)
        if found:
            _log.error(
                "scales changed that nobody wrote; the prefix cache was emptied. If it happens again, "
                "the memory of this device is faulty:\n  %s",
                "\n  ".join(found[:_MOST_SHOWN]),
            )
