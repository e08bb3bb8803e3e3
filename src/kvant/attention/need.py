"""What a layer needs from a backend, evaluated once at plan time, without torch.

`refuse` covers writer and reader together, so no writer can refuse later what a reader accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import LayerGeometry
from kvant.kv.spec import WideRows

LONG = 256
"""Minimum query tokens of a long sequence, see `Step.long`."""

LONG_STRIDE = 1024
"""Best stride to cut a prompt that takes several steps: at multiples of this many tokens, long
stretches need few shapes and little padding."""

FIXED_SPLIT = 1024
"""Keys per part of a query's attention on a GPU in batch-invariant mode, for any query position."""

MOST_PARTS = 1 << 30
"""Maximum bytes of such parts at once: queries with more are computed in several slices."""


class DeviceKind(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts of a device for planning; the device need not be present.

    arch: "sm_90", "gfx942", "" for a CPU. has_bf16: fast bfloat16 arithmetic.
    has_avx2: the CPU has AVX2, FMA and F16C, as x86 CPUs since 2013 do.
    """

    kind: DeviceKind
    arch: str = ""
    has_bf16: bool = True
    has_avx2: bool = True

    @property
    def capability(self) -> int:
        """Returns the compute capability of an NVIDIA GPU, 90 for "sm_90a", and 0 for other devices."""
        match = re.fullmatch(r"sm_(\d+)[a-z]?", self.arch)
        return int(match.group(1)) if self.kind is DeviceKind.CUDA and match else 0


@dataclass(frozen=True, slots=True)
class Need:
    """One layer's storage on one device. v is None for MLA.

    batch_invariant: a query's result must depend on its own sequence alone. wide: rows that are stored a
    second time, or None.
    """

    layer: LayerGeometry
    k: KVDtype
    v: KVDtype | None
    compute: ComputeDtype
    page_size: int
    device: DeviceFacts
    batch_invariant: bool = False
    wide: WideRows | None = None


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend for planning. module: its `backend()` builds the real one (imports torch).

    refuse: why the backend cannot serve this need, or None; pure, and callable without the device.
    batch_invariant: it can promise, bit for bit, that a query's result depends neither on the rest of
    the step nor on how many queries of its sequence are in it. `backend()` then takes
    `batch_invariant=True`.
    rounds_long: it rounds queries and probabilities of `Step.long` to the four significant bits of e4m3,
    and verification uses that definition there.
    package: a package that its kernels need, if `refuse` does not check it.
    wide_rows: it serves layers with wide rows, and then each of their two formats alone too.
    """

    name: str
    module: str
    refuse: Callable[[Need], str | None]
    batch_invariant: bool = False
    rounds_long: bool = False
    package: str | None = None
    wide_rows: bool = False
