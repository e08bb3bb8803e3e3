"""What a layer needs from a backend, asked once at plan time, without torch.

`refuse` is the one question: it covers writer and reader together, so no writer can refuse later
what a reader accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import LayerGeometry

LONG = 256
"""Query tokens from which a sequence of a step counts as long: see `Step.long`."""

LONG_STRIDE = 1024
"""Where a prompt that takes several steps is best cut: at multiples of so many tokens, long stretches
need few shapes and little padding."""

FIXED_SPLIT = 1024
"""Keys of a part of a query's attention on a GPU in batch-invariant mode, wherever the query stands."""

MOST_PARTS = 1 << 30
"""Bytes of such parts at once: queries that have more of them are attended to one after the other."""


class DeviceKind(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as planning knows it; it need not be present.

    arch: "sm_90", "gfx942", "" for a CPU. has_bf16: fast bfloat16 arithmetic.
    has_avx2: of a CPU, that it has AVX2, FMA and F16C, as x86 CPUs since 2013 do.
    """

    kind: DeviceKind
    arch: str = ""
    has_bf16: bool = True
    has_avx2: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """One layer's storage on one device. v is None for MLA.

    batch_invariant: whether a query's result may depend on nothing but its own sequence.
    """

    layer: LayerGeometry
    k: KVDtype
    v: KVDtype | None
    compute: ComputeDtype
    page_size: int
    device: DeviceFacts
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend as planning knows it. module: where `backend()` makes the real one (imports torch).

    refuse: why the backend cannot serve this need, or None; pure, and callable without the device.
    batch_invariant: whether it can promise that, bit for bit, a query's result depends neither on what
    else is in the step nor on how many queries of its sequence are. Then `backend()` takes
    `batch_invariant=True`.
    rounds_long: whether it rounds queries and probabilities of `Step.long` to the four significant bits of
    e4m3, and is held to that definition there.
    package: without which its kernels cannot run, where `refuse` does not ask for it.
    """

    name: str
    module: str
    refuse: Callable[[Need], str | None]
    batch_invariant: bool = False
    rounds_long: bool = False
    package: str | None = None
