"""The Walsh-Hadamard transform of rows, for formats that store rotated rows.

Attention never rotates K or V back: (H k) . (H q) / B equals k . q. The output row, a sum over rotated
values, is rotated back once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def hadamard(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Transforms x [ROWS, COLUMNS] in blocks of SIZE along the columns, unnormalised; float32 butterflies.

    Strides 1, 2, 4, .. SIZE / 2, each (a, b) -> (a + b, a - b): the order of the definition.
    """
    STAGES: tl.constexpr = SIZE.bit_length() - 1
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (ROWS, COLUMNS // (2 << stage), 2, 1 << stage))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
        x = tl.reshape(x, (ROWS, COLUMNS))
    return x


@triton.jit(do_not_specialize=("rows",))
def rotate_rows(
    x_ptr, out_ptr, rows, by,
    HEAD: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out [rows, HEAD] float32 = Hadamard(x [rows, HEAD]) * by. AHEAD: launched while the kernel before still
    runs.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, PAD)
    mask = (r < rows)[:, None] & (c < HEAD)[None, :]
    at = r.to(tl.int64)[:, None] * HEAD + c[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, hadamard(x, ROWS, PAD, SIZE) * by, mask=mask)
