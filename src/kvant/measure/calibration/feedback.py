"""Matrices for rounding keys with error feedback, from the second moment of the queries that read them.

A score's error is q . (k' - k). Over queries with second moment H, its expected square is e^T H e for an
error e of the row. With H = U diag(d) U^T, U upper triangular with ones on its diagonal, this is the sum of
d_i (e_i + sum over j < i of U_ji e_j)^2. Rounding element i of the row to the number nearest to
y_i + sum over j < i of U_ji e_j, with e_j = y_j - stored_j, makes every term small in turn. (The idea is
GPTQ's, arXiv 2210.17323, with one fixed matrix per KV head.) Rows are rotated, so H is of rotated queries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvant.measure.calibration.seen import Seen

RIDGE = 1e-4
"""Share of H's mean diagonal that is added to the diagonal, so that H is regular without queries too."""


def feedback_matrices(seen: Seen) -> dict[int, Tensor]:
    """Returns M = U - 1 by layer index: float32 [num_kv_heads, head_dim, head_dim], strictly upper."""
    return {
        index: feedback_of(torch.from_numpy(layer.moment / max(1, layer.queries)))
        for index, layer in seen.items()
    }


def feedback_of(moment: Tensor) -> Tensor:
    """Returns M for second moments [.., D, D] float64 of rotated queries: float32 [.., D, D]."""
    return unit_upper(moment).triu(1).float()


def unit_upper(moment: Tensor) -> Tensor:
    """Returns U of H = U diag(d) U^T, with the ridge.

    H: [.., D, D] float64, symmetric, positive semidefinite.
    """
    size = moment.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridged = moment + RIDGE * mean.clamp(min=np.finfo(np.float64).tiny) * torch.eye(
        size, dtype=moment.dtype
    )
    # A Cholesky factor is lower triangular; with rows and columns reversed it is upper triangular.
    upper = torch.linalg.cholesky(ridged.flip(-2, -1)).flip(-2, -1)
    unit: Tensor = upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return unit
