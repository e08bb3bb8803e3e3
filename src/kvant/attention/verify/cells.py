"""The cells of the support matrix, and the cells that a backend refuses. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind, Need
from kvant.attention.select import refusal
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.names import FormatRequest, whole_formats
from kvant.kv.spec import Choice, Scale, ScaleState, Source, WideRows

HEAD_SIZES = (64, 80, 96, 128, 256, 512)
QUERIES = (1, 16, 512)
"""Query tokens of a sequence: a decode step, a verified or drafted block, a chunk of a prompt."""
WINDOW = 100
NUM_Q_HEADS, NUM_KV_HEADS = 8, 2
PAGE_SIZE = 16

_MIXED = (
    (KVDtype.BFLOAT16, KVDtype.FP8_E4M3),
    (KVDtype.FP8_E4M3, KVDtype.INT4_PER_TOKEN_HEAD),
    (KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.NVFP4),
    (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.FP8_PER_TOKEN_HEAD),
    (KVDtype.NVFP4, KVDtype.BFLOAT16),
)
_MIXED_HEAD_SIZES = (64, 128)

_WIDE = (
    (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.BFLOAT16),
    (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD),
    (KVDtype.INT4_SHORT, KVDtype.INT4_SHORT, KVDtype.BFLOAT16),
    (KVDtype.INT4_SHORT, KVDtype.NORMAL2, KVDtype.BFLOAT16),
    (KVDtype.NORMAL2, KVDtype.NORMAL2, KVDtype.BFLOAT16),
    (KVDtype.NVFP4, KVDtype.NVFP4, KVDtype.BFLOAT16),
    (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3, KVDtype.BFLOAT16),
)
"""K, V and wide formats to verify: kernels for wide rows have more code paths than the formats alone."""

_SINK = 4

LATENTS = {288: 256, 320: 256, 576: 512}
"""Width of the latent by width of the stored row, for latent attention."""

NUM_LATENT_HEADS = 16
_FEWEST_LATENT_BITS = 8


@dataclass(frozen=True, slots=True)
class Mask:
    """One kind of attention; its text is its name in tables and files."""

    causal: bool
    window: int | None

    def __str__(self) -> str:
        word = "causal" if self.causal else "non-causal"
        return word if self.window is None else f"{word}, window"


MASKS = tuple(Mask(causal, window) for window in (None, WINDOW) for causal in (True, False))


@dataclass(frozen=True, slots=True)
class Row:
    """Cells that differ only in mask and queries. v: None for latents, of `head_dim` numbers.

    wide: the format of wide rows, the first 4 and the last 100; None without them.
    name: "K" or "K/V", as in `--kv-cache-dtype`; "K, latent" for latents; "K/V, wide W" with wide rows.
    """

    k: KVDtype
    v: KVDtype | None
    head_dim: int
    wide: KVDtype | None = None

    @property
    def name(self) -> str:
        if self.v is None:
            return f"{self.k}, latent"
        stored = str(FormatRequest(self.k, self.v))
        return stored if self.wide is None else f"{stored}, wide {self.wide}"


def rows() -> Iterator[Row]:
    """Yields the whole matrix: every format, the named pairs, and pairs that mix K and V.

    Formats with feedback are left out: they are read as the format with the same bytes, and their writers are
    verified when an engine starts, and by the suite. So are wide rows of one side: such a page holds two
    forms that other cells verify, and after a new cell each device must run the whole matrix again.
    """
    pairs = [(asked.k, asked.v) for asked in whole_formats()]
    pairs += [(dtype, dtype) for dtype in KVDtype if dtype.format.device_only]
    for k, v in pairs:
        assert isinstance(k, KVDtype)
        assert isinstance(v, KVDtype)
        yield from (Row(k, v, head_dim) for head_dim in HEAD_SIZES)
    for k, v in _MIXED:
        yield from (Row(k, v, head_dim) for head_dim in _MIXED_HEAD_SIZES)
    for narrow_k, narrow_v, wide in _WIDE:
        yield from (Row(narrow_k, narrow_v, head_dim, wide) for head_dim in _MIXED_HEAD_SIZES)
    for k, v in pairs:
        assert isinstance(k, KVDtype)
        if k is v and k.format.bits >= _FEWEST_LATENT_BITS:
            yield from (Row(k, None, width) for width in LATENTS)


def need_of(
    row: Row,
    mask: Mask,
    device: DeviceFacts,
    compute: ComputeDtype,
    *,
    batch_invariant: bool = False,
) -> Need:
    """Returns what a layer of this cell needs from a backend at plan time."""
    kind = Attention.FULL if mask.window is None else Attention.SLIDING
    is_latent = row.v is None
    layer = LayerGeometry(
        index=0,
        name="verify",
        attention=Attention.MLA if is_latent else kind,
        num_q_heads=NUM_LATENT_HEADS if is_latent else NUM_Q_HEADS,
        num_kv_heads=1 if is_latent else NUM_KV_HEADS,
        head_dim_k=row.head_dim,
        head_dim_v=LATENTS[row.head_dim] if is_latent else row.head_dim,
        window=mask.window,
        causal=mask.causal,
    )
    wide = None
    if row.wide is not None:
        choice = Choice(row.wide, Source.EXPLICIT, "verification", (), Scale(ScaleState.NONE))
        wide = WideRows(choice, choice, _SINK, WINDOW)
    return Need(layer, row.k, row.v, compute, PAGE_SIZE, device, batch_invariant, wide)


def refused(
    info: BackendInfo,
    row: Row,
    device: DeviceFacts,
    compute: ComputeDtype,
    *,
    batch_invariant: bool = False,
) -> dict[Mask, str]:
    """Returns why this backend does not serve a row, for the masks that it refuses."""
    found: dict[Mask, str] = {}
    for mask in MASKS:
        need = need_of(row, mask, device, compute, batch_invariant=batch_invariant)
        reason = refusal(need, info)
        if reason is None and row.wide is not None and (mask.window or not mask.causal):
            reason = "wide rows are those of causal layers without a window"
        if reason is not None:
            found[mask] = reason
    return found


def usual_compute(device: DeviceFacts) -> ComputeDtype:
    """Returns the default dtype of models on such a device."""
    if device.kind is DeviceKind.CPU:
        return ComputeDtype.FLOAT32
    return ComputeDtype.BFLOAT16 if device.has_bf16 else ComputeDtype.FLOAT16
