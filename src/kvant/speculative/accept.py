"""Which drafts are accepted: a draft that equals the target's own choice.

The target chooses its own token in every row that it verified, exactly as it would without drafts:
after the same rules, and with the same random number, which belongs to the token's place in the
answer (`kvant.sampling.sampler`). A draft is accepted if it is that token. The first draft that differs is
replaced by it, and the rest is dropped.

So a draft d is accepted with the probability p(d) that the target gives it, and what comes instead of
a rejected one is a token of p without d: the rule of speculative sampling (arXiv 2211.17192) for a
drafter that is certain of its one token. Nothing about p needs to be known here, and the same seed
gives the same answer with and without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def verify(
    drafts: Sequence[int], choose: Callable[[int], T], token_of: Callable[[T], int | None]
) -> list[T]:
    """What the target chose, as far as the drafts go along with it: 1 to len(drafts) + 1 choices.

    choose(j): the target's choice after the first j drafts; only asked where these stand. token_of: a
    choice's token, None for one that ends everything (a row of NaN is never accepted, nor anything
    behind it).
    """
    chosen = []
    for place in range(len(drafts) + 1):
        chosen.append(choose(place))
        token = token_of(chosen[-1])
        if token is None or place == len(drafts) or token != drafts[place]:
            break
    return chosen
