"""Finds NaN and Inf in weights before anything is served."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.json_file import COPY_AGAIN

_MOST_NAMED = 5


def check_finite(path: Path, module: nn.Module) -> None:
    """Raises BadCheckpoint, naming the tensors, if a weight has NaN or Inf.

    Reads each weight once, at memory speed, without copies. Skips eight-bit weights: their source has no such
    values, or its decoder checks it.
    """
    names, extremes = [], []
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and weight.element_size() > 1 and weight.numel():
            names.append(name)
            extremes.append(torch.stack(torch.aminmax(weight.detach())).double())
    if not names:
        return
    finite = torch.isfinite(torch.stack(extremes)).all(dim=1).tolist()  # NaN gives NaN extremes
    broken = [name for name, good in zip(names, finite, strict=True) if not good]
    if broken:
        shown = ", ".join(broken[:_MOST_NAMED]) + (", .." if len(broken) > _MOST_NAMED else "")
        raise BadCheckpoint(
            f"{path}: {len(broken)} of the model's weights hold NaN or infinite numbers: {shown}",
            why="every logit would be NaN; the files are damaged, or a conversion exceeded the range "
            "of their dtype",
            ways_out=(COPY_AGAIN,),
        )
