"""`AttentionBackend` for CPUs with AVX2: writes and reads pages of every format with numba kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.attention.cpu import attend, write
from kvant.attention.cpu.decode import key_kernel, row_kernel, value_kernel
from kvant.attention.cpu.format import Format, format_of
from kvant.attention.cpu.layout import Call, Real, Write
from kvant.kernels.cpu.block import Block, address, block_of, float_bits
from kvant.kernels.cpu.threads import parallel_address
from kvant.kv.codecs.float8 import FLOAT8
from kvant.kv.codecs.rotation import block_length
from kvant.kv.format import Encoding
from kvant.kv.pool import LayerCache
from kvant.kv.spec import Choice

_REAL = {
    torch.float32: Real.FLOAT32,
    torch.float16: Real.FLOAT16,
    torch.bfloat16: Real.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class _Side:
    """Facts about K or V of one layer."""

    format: Format
    planes: tuple[Tensor, ...]
    outer: Tensor | None
    head_dim: int
    takes_rounding: bool

    @property
    def factor(self) -> float:
        rotation = 1.0 / block_length(self.head_dim) if self.format.rotated else 1.0
        return self.format.factor * rotation

    @property
    def scales(self) -> Tensor | None:
        return self.planes[1] if len(self.planes) > 1 else None


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys that one call reads, and the result that it joins; fields as in `Call`.

    floor, ceiling: first key and end of keys (0 for no end). lag: number of latest keys to leave out. state:
    float32 [tokens, query heads, 2], for joining. folds: join with the result in `out` and `state`.
    """

    floor: int = 0
    ceiling: int = 0
    lag: int = 0
    state: Tensor | None = None
    folds: bool = False


_EVERY_KEY = _Keys()


@dataclass(frozen=True, slots=True)
class _Layer:
    """Constants of a layer between calls: blocks of `Call` and `Write` with the layer's facts.

    cache: kept, because the blocks hold addresses in it.
    """

    cache: LayerCache
    call: Block
    write_k: Block
    write_v: Block


@dataclass(frozen=True, slots=True)
class Recorded:
    """Attention of one layer over fixed memory: blocks for the entries of `write` and `attend`.

    They do not contain the step: see `kvant.models.cpu.program`. kept: objects whose addresses they hold.
    """

    write: int
    attend: int
    kept: tuple[object, ...]


class CpuBackend:
    """Attention on a CPU, always batch-invariant: a query's result has the same bits in any step, however its
    prompt is cut, and on any number of threads (torch's: `torch.get_num_threads`).

    For one thread of Python at a time: memory for threads and blocks of arguments are reused.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._e4m3 = FLOAT8[Encoding.E4M3FN].decode(torch.arange(256, dtype=torch.uint8))
        self._parallel = parallel_address()
        self._write, self._writers = write.write_function().call, write.worker_address()
        self._attend, self._attenders = attend.attend_function().call, attend.worker_address()

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encodes k, v [T, num_kv_heads, head_dim] into `step.slot_mapping`'s slots; -1 is skipped."""
        assert v is not None, "refuse() excludes latents"
        if cache.wide is not None:
            self.write(cache.wide, k, v, step.of(cache.wide_group))
        layer = self._layer(cache)
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        threads = torch.get_num_threads()
        slots = step.slot_mapping.contiguous()
        if cache.saturation is not None:
            cache.saturation.sample((k, v), (cache.k_scale, cache.v_scale), slots)
        stride = _aligned(write.scratch_bytes(max(k.shape[-1], v.shape[-1])))
        scratch = self._room(threads * stride)
        for x, block in ((k, layer.write_k), (v, layer.write_v)):
            _set_rows(block, x)
            block[Write.SLOTS // 8] = slots.data_ptr()
            block[Write.TOKENS // 8] = x.shape[0]
            block[Write.SCRATCH // 8] = scratch
            block[Write.SCRATCH_STRIDE // 8] = stride
        self._write(address(layer.write_k), self._writers, self._parallel, threads)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends with q [T, num_q_heads, head_dim_k]; returns [T, num_q_heads, head_dim_v] in q's dtype.

        Tokens of no sequence, or of a sequence without stored tokens, get zeros.
        """
        if q.stride(-1) != 1:
            q = q.contiguous()
        shape = q.shape[0], q.shape[1], cache.spec.geometry.head_dim_v
        if cache.wide is None:
            return self._attend_one(cache, q, step, params, q.new_empty(shape), _EVERY_KEY)
        return self._attend_both(cache, q, step, params, torch.empty(shape)).to(q.dtype)

    def _attend_both(
        self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, out: Tensor
    ) -> Tensor:
        """Implements `attend` for a layer with wide rows: one call per form, joined in float32 out."""
        assert cache.wide is not None
        assert cache.spec.wide is not None
        sink, recent = cache.spec.wide.sink, cache.spec.wide.recent
        state = torch.zeros(*out.shape[:2], 2)  # no keys so far
        bare = replace(params, sinks=None)
        keys = _Keys(floor=sink, lag=recent, state=state)
        self._attend_one(cache, q, step, bare, out, keys)
        wide, keys = step.of(cache.wide_group), replace(keys, lag=0, folds=True)
        if sink:
            # Attention sinks are added once, by the call in which every query has keys.
            self._attend_one(cache.wide, q, wide, params, out, replace(keys, floor=0, ceiling=sink))
            params = bare
        return self._attend_one(cache.wide, q, wide, replace(params, window=recent), out, keys)

    def _attend_one(
        self,
        cache: LayerCache,
        q: Tensor,
        step: Step,
        params: AttentionParams,
        out: Tensor,
        keys: _Keys,
    ) -> Tensor:
        """Attends over some keys of one form. Returns out [T, num_q_heads, head_dim_v]."""
        call = self._layer(cache).call
        call[Call.FLOOR // 8], call[Call.CEILING // 8] = keys.floor, keys.ceiling
        call[Call.LAG // 8], call[Call.FOLD // 8] = keys.lag, keys.folds
        call[Call.STATE // 8] = 0 if keys.state is None else keys.state.data_ptr()
        table = step.page_table if step.page_table.stride(-1) == 1 else step.page_table.contiguous()
        threads = torch.get_num_threads()
        stride = _attend_bytes(cache)
        _set_queries(call, q, out)
        sinks = _set_params(call, params)  # noqa: F841 - the block holds its address
        call[Call.NUM_SEQS // 8] = step.seqlens_kv.shape[0]
        call[Call.TOKENS // 8] = q.shape[0]
        call[Call.CU_SEQLENS_Q // 8] = step.cu_seqlens_q.data_ptr()
        call[Call.SEQLENS_KV // 8] = step.seqlens_kv.data_ptr()
        call[Call.PAGE_TABLE // 8] = table.data_ptr()
        call[Call.PAGE_TABLE_STRIDE // 8] = table.stride(0)
        call[Call.CAUSAL // 8] = step.causal
        call[Call.SCRATCH // 8] = self._room(threads * stride)
        call[Call.SCRATCH_STRIDE // 8] = stride
        self._attend(address(call), self._attenders, self._parallel, threads)
        return out

    def record(
        self,
        cache: LayerCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        params: AttentionParams,
        scratch: Tensor,
    ) -> Recorded:
        """Records calls whose tensors are in the same memory every time.

        q: [T, num_q_heads, head_dim_k]. k, v: [T, num_kv_heads, head_dim]. out: [T, num_q_heads, head_dim_v].
        scratch: uint8 [threads, at least `scratch_bytes`], which calls may share.
        """
        layer = self._make(cache)
        room = _aligned(scratch.data_ptr())
        for x, block in ((k, layer.write_k), (v, layer.write_v)):
            _set_rows(block, x)
            block[Write.SCRATCH // 8], block[Write.SCRATCH_STRIDE // 8] = room, scratch.stride(0)
        _set_queries(layer.call, q, out)
        sinks = _set_params(layer.call, params)
        layer.call[Call.SCRATCH // 8], layer.call[Call.SCRATCH_STRIDE // 8] = (
            room,
            scratch.stride(0),
        )
        return Recorded(
            address(layer.write_k),
            address(layer.call),
            (layer, q, k, v, out, sinks, scratch, self._e4m3),
        )

    def _room(self, num_bytes: int) -> int:
        """Returns the address of scratch memory of at least this size, aligned to a cache line."""
        if self._scratch.numel() < num_bytes + 64:
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return _aligned(self._scratch.data_ptr())

    def _layer(self, cache: LayerCache) -> _Layer:
        """Returns the layer's blocks; the first call compiles or loads its formats' kernels."""
        found = self._layers.get(id(cache))
        if found is None:
            found = self._layers[id(cache)] = self._make(cache)
        return found

    def _make(self, cache: LayerCache) -> _Layer:
        g = cache.spec.geometry
        k = _side(cache.k, cache.spec.k, cache.k_scale, g.head_dim_k)
        v = _side(cache.v, cache.spec.v, cache.v_scale, g.head_dim_v)
        call = block_of(Call)
        call[Call.PAGE_SIZE // 8] = cache.page_size
        call[Call.PAGE_STRIDE // 8] = cache.page_stride
        call[Call.KV_HEADS // 8] = g.num_kv_heads
        call[Call.GROUP // 8] = g.num_q_heads // g.num_kv_heads
        call[Call.K_HEAD_DIM // 8], call[Call.V_HEAD_DIM // 8] = g.head_dim_k, g.head_dim_v
        call[Call.E4M3 // 8] = self._e4m3.data_ptr()
        call[Call.V_HALVES // 8] = v.format.codes.bits == 4
        writes = []
        for side, first, kernel in (
            (k, Call.K_CODES, key_kernel(k.format.number)),
            (v, Call.V_CODES, value_kernel(v.format.number)),
        ):
            codes, outer = side.planes[0], side.outer
            row_bytes = codes.shape[-1] * codes.element_size()
            at = first // 8
            call[at : at + 9] = (
                codes.data_ptr(),
                row_bytes,
                0 if side.scales is None else side.scales.data_ptr(),
                side.format.scaling,
                0 if outer is None else outer.data_ptr(),
                0 if outer is None else outer.numel(),
                float_bits(side.factor),
                side.format.rotated,
                kernel.address,
            )
            made = block_of(Write)
            scale_bytes = 0
            if side.scales is not None:
                scale_bytes = side.scales.shape[-1] * side.scales.element_size()
            made[Write.HEADS // 8], made[Write.HEAD_DIM // 8] = g.num_kv_heads, side.head_dim
            made[Write.PAGE_SIZE // 8] = cache.page_size
            made[Write.PAGE_STRIDE // 8] = cache.page_stride
            made[Write.CODES // 8], made[Write.ROW_BYTES // 8] = codes.data_ptr(), row_bytes
            made[Write.SCALES // 8], made[Write.SCALE_BYTES // 8] = call[at + 2], scale_bytes
            made[Write.OUTER // 8], made[Write.OUTERS // 8] = call[at + 4], call[at + 5]
            if side.takes_rounding:
                matrices = cache.k_rounding if side is k else None
                made[Write.OUTER // 8] = 0 if matrices is None else matrices.data_ptr()
                made[Write.OUTERS // 8] = -(side.head_dim**2)
            made[Write.E4M3 // 8] = self._e4m3.data_ptr()
            made[Write.KERNEL // 8] = row_kernel(side.format.write).address
            writes.append(made)
        writes[0][Write.OTHER // 8] = address(writes[1])
        return _Layer(cache, call, writes[0], writes[1])


def backend(*, batch_invariant: bool = False) -> AttentionBackend:
    """Builds the backend for the engine; it is always batch-invariant."""
    return CpuBackend()


def entries() -> tuple[int, int, int, int]:
    """Returns the addresses of the compiled writer, its worker, the compiled reader and its worker.

    Writer and reader are called as int64(block, worker, parallel, threads); see `Recorded`.
    """
    return (
        write.write_function().address,
        write.worker_address(),
        attend.attend_function().address,
        attend.worker_address(),
    )


def scratch_bytes(cache: LayerCache) -> int:
    """Returns scratch bytes per thread for this layer, with room for alignment to a cache line."""
    g = cache.spec.geometry
    rows = _aligned(write.scratch_bytes(max(g.head_dim_k, g.head_dim_v)))
    return max(rows, _attend_bytes(cache)) + _aligned(1)


def _attend_bytes(cache: LayerCache) -> int:
    g = cache.spec.geometry
    return _aligned(
        attend.scratch_bytes(g.head_dim_k, g.head_dim_v, g.num_q_heads // g.num_kv_heads)
    )


def _set_rows(block: Block, x: Tensor) -> None:
    size = x.element_size()
    block[Write.X // 8] = x.data_ptr()
    block[Write.TOKEN_STRIDE // 8] = x.stride(0) * size
    block[Write.HEAD_STRIDE // 8] = x.stride(1) * size
    block[Write.REAL // 8] = _REAL[x.dtype]


def _set_queries(call: Block, q: Tensor, out: Tensor) -> None:
    call[Call.Q // 8] = q.data_ptr()
    call[Call.Q_TOKEN_STRIDE // 8] = q.stride(0) * q.element_size()
    call[Call.Q_HEAD_STRIDE // 8] = q.stride(1) * q.element_size()
    call[Call.Q_REAL // 8], call[Call.OUT_REAL // 8] = _REAL[q.dtype], _REAL[out.dtype]
    call[Call.OUT // 8] = out.data_ptr()


def _set_params(call: Block, params: AttentionParams) -> Tensor | None:
    """Sets the parameters in the block; returns the sinks, which the caller must keep alive."""
    sinks = None if params.sinks is None else params.sinks.float().contiguous()
    call[Call.SCALE // 8] = float_bits(params.scale)
    call[Call.SOFTCAP // 8] = float_bits(params.softcap)
    call[Call.WINDOW // 8] = params.window or 0
    call[Call.SINKS // 8] = 0 if sinks is None else sinks.data_ptr()
    return sinks


def _side(
    planes: tuple[Tensor, ...], choice: Choice | None, outer: Tensor | None, head_dim: int
) -> _Side:
    assert choice is not None, "refuse() excludes layers that store only one side"
    takes_rounding = choice.dtype.format.takes_rounding
    return _Side(format_of(choice.dtype), planes, outer, head_dim, takes_rounding)


def _aligned(address: int) -> int:
    return -(-address // 64) * 64
