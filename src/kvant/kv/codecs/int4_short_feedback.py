"""int4_short_feedback: int4_short whose codes are rounded as int4_feedback's. Keys only."""

from __future__ import annotations

from kvant.kv.codecs import Codec
from kvant.kv.codecs.int4_feedback import FeedbackInt4Codec
from kvant.kv.codecs.int4_short import ShortInt4Codec
from kvant.kv.format import KVFormat


def codec(fmt: KVFormat) -> Codec:
    return FeedbackInt4Codec(ShortInt4Codec())
