"""The rule of acceptance: a draft is accepted if it equals the target's own choice.

In every row that it verifies, the target chooses a token exactly as it would without drafts. It applies the
same rules and uses the same random number, which depends on the token's place in the answer
(`kvant.sampling.sampler`). A draft is accepted if it is that token. The first draft that differs is replaced
by the target's token, and the later drafts are dropped.

So a draft d is accepted with the probability p(d) that the target gives it. A rejected draft is replaced by
a token sampled from p without d. This is the rule of speculative sampling (arXiv 2211.17192) for a drafter
that gives its one token probability 1. This module does not need p, and the same seed gives the same answer
with and without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def verify(
    drafts: Sequence[int], choose: Callable[[int], T], token_of: Callable[[T], int | None]
) -> list[T]:
    """Returns the target's choices up to the first that differs from its draft: 1 to len(drafts) + 1.

    choose(j): the target's choice after the first j drafts, called only if these were accepted. token_of:
    a choice's token; None for a choice that ends the answer, such as a row of NaN, and stops here.
    """
    chosen = []
    for place in range(len(drafts) + 1):
        chosen.append(choose(place))
        token = token_of(chosen[-1])
        if token is None or place == len(drafts) or token != drafts[place]:
            break
    return chosen
