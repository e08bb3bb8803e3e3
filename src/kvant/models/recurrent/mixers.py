"""Kvant's mixers for modules of transformers with recurrent states, by class: their states and arithmetic.

Each mixer runs packed tokens [T, hidden] with the weights, projections and norms of transformers' module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvant.kv.geometry import StateGeometry, StateKind
from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.conv import causal_conv
from kvant.models.recurrent.elementwise import elementwise_scan
from kvant.models.recurrent.packed import Packed, in_turns, takes_kernels
from kvant.models.recurrent.scan import CHUNK, scan
from kvant.weights.linear import NarrowLinear

if TYPE_CHECKING:
    from kvant.models.recurrent.mamba_layer import Finish

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer for one step. recurrent: None for a layer with a convolution only.

    multiply: computes x [T, columns] times weight [rows, columns] plus bias [rows] or None: [T, rows].
    """

    packed: Packed
    conv: StateCache | None
    recurrent: StateCache | None
    multiply: Product = F.linear


class Mixer(Protocol):
    """Runs one layer with recurrent states."""

    @property
    def states(self) -> tuple[StateGeometry, ...]:
        """The states that the layer keeps for each sequence."""
        ...

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Runs the layer: x [T, hidden] -> [T, hidden] in its dtype. Reads and updates the states."""
        ...


@runtime_checkable
class Framed(Mixer, Protocol):
    """A mixer that begins and ends with one matrix product, if `is_framed` is true.

    entry: weight [rows, hidden] of the first product. exit: weight [hidden, columns] of the last.
    """

    @property
    def is_framed(self) -> bool: ...

    @property
    def entry(self) -> Tensor: ...

    @property
    def exit(self) -> Tensor: ...

    def between(self, projected: Tensor, states: LayerStates) -> Tensor:
        """Runs what lies between the products: [T, rows] -> [T, columns] in its dtype. Updates the states."""
        ...


_NORMS_OF_QWEN = frozenset(
    {"Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated"}
)
"""Norms that `kernels.gated_norm` computes."""


_ROUNDING_NORMS = frozenset(
    {"BambaRMSNormGated", "GraniteMoeHybridRMSNormGated", "NemotronHRMSNormGated"}
)
"""Norms of Mamba2 that gate first, and round normalised numbers before the weight multiplies them."""


_WIDEST = 128
"""Maximum number of keys, and of values, of a head in `delta_chunks`: its programs hold a chunk of them."""


def _conv_state(kernel: int, channels: int) -> StateGeometry:
    return StateGeometry(StateKind.CONV, (kernel - 1, channels))


def _recurrent_state(heads: int, values: int, keys: int) -> StateGeometry:
    return StateGeometry(StateKind.RECURRENT, (heads, values, keys))


def _project(x: Tensor, layer: Any, states: LayerStates) -> Tensor:
    """Applies a linear layer to x [T, columns], by the step's product if its weight is unquantised."""
    if type(layer) is nn.Linear:
        return states.multiply(x, layer.weight, layer.bias)
    if isinstance(layer, NarrowLinear):  # tokens run in turn in batch-invariant mode alone
        return layer.product(x, alike=states.packed.singly)
    found: Tensor = layer(x)
    return found


def _normed(x: Tensor) -> Tensor:
    """Scales rows to length one, which the gated delta rule needs for q and k; in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class _DeltaRule:
    """Base of gated delta nets and KDA: a convolution over q, k and v, and the delta rule."""

    def __init__(self, module: Any, key_heads: int, heads: int, keys: int, values: int) -> None:
        self.module = module
        self.key_heads, self.heads, self.keys, self.values = key_heads, heads, keys, values

    @property
    def states(self) -> tuple[StateGeometry, ...]:
        channels = 2 * self.key_heads * self.keys + self.heads * self.values
        return (
            _conv_state(self.module.conv_kernel_size, channels),
            _recurrent_state(self.heads, self.values, self.keys),
        )

    def convolve(self, qkv: Tensor, states: LayerStates) -> Tensor:
        """Convolves qkv [T, channels] and updates the states; returns [T, channels]."""
        assert states.conv is not None
        conv = self.module.conv1d
        return causal_conv(qkv, conv.weight[:, 0], conv.bias, states.conv, states.packed, silu=True)

    def delta(
        self, mixed: Tensor, g: Tensor, beta: Tensor, states: LayerStates, *, singles: bool = True
    ) -> Tensor:
        """Runs the delta rule over mixed [T, channels], the convolution's result; returns [T, heads, values].

        g: [T, heads] or [T, heads, keys], logarithms of decays. beta: [T, heads]. singles: as in `scan`. The
        result has mixed's dtype.
        """
        assert states.recurrent is not None
        width = self.key_heads * self.keys
        q, k, v = torch.split(mixed, [width, width, self.heads * self.values], 1)
        q, k = (x.reshape(len(x), self.key_heads, self.keys) for x in (q, k))
        out = scan(
            _normed(q) * self.keys**-0.5, _normed(k), v.reshape(len(v), self.heads, self.values),
            g, beta, states.recurrent, states.packed, singles=singles,
        )  # fmt: skip
        return out.to(mixed.dtype)


class GatedDeltaNet(_DeltaRule):
    """The gated delta nets of Qwen3-Next, Qwen3.5 and OLMo-Hybrid, which differ in their projections."""

    def __init__(self, module: Any) -> None:
        super().__init__(
            module, module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
        )
        self._joined: Tensor | None = None

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Implements `Mixer.run`: x [T, hidden] -> [T, hidden]."""
        m = self.module
        if self._joined is not None or (self.is_framed and x.device.type != "cpu"):
            inner = self.between(states.multiply(x, self.entry, None), states)
            return states.multiply(inner, self.exit, None)
        normed = self._between(*self._project(x, states), states)
        return _project(normed, m.o_proj if hasattr(m, "o_proj") else m.out_proj, states)

    @property
    def is_framed(self) -> bool:
        """Whether the projections can be joined: unquantised without biases, in a module of Qwen3.5."""
        m = self.module
        if not hasattr(m, "in_proj_qkv"):
            return False
        return all(type(x) is nn.Linear and x.bias is None for x in (*self._parts, m.out_proj))

    @property
    def entry(self) -> Tensor:
        """Weight [channels + heads * values + 2 * heads, hidden] of the first projections, joined on use."""
        if self._joined is None:
            self._joined = _join(self._parts)
        return self._joined

    @property
    def exit(self) -> Tensor:
        """Weight [hidden, heads * values] of the last projection."""
        weight: Tensor = self.module.out_proj.weight
        return weight

    def between(self, projected: Tensor, states: LayerStates) -> Tensor:
        """Implements `Framed.between`: projected [T, rows of `entry`] -> [T, heads * values]."""
        qkv, z, b, a = torch.split(projected, self.sizes, 1)
        return self._between(qkv, z, b, a, states)

    @property
    def sizes(self) -> list[int]:
        """Rows of `entry` for the convolution's inputs, the gate, b and a."""
        wide = self.heads * self.values
        return [2 * self.key_heads * self.keys + wide, wide, self.heads, self.heads]

    @property
    def is_joinable(self) -> bool:
        """Whether `join` works: the module is of Qwen3.5 or Qwen3-Next, unquantised, without biases."""
        m = self.module
        if not hasattr(m, "in_proj_qkvz"):
            return self.is_framed
        parts = m.in_proj_qkvz, m.in_proj_ba, m.out_proj
        return all(type(x) is nn.Linear and x.bias is None for x in parts)

    def join(self) -> int:
        """Joins the projections into `entry`. Returns the bytes that this adds to the module's own weights.

        Qwen3-Next stores rows of all kinds by key head. They are reordered, and the module's own weights
        emptied.
        """
        m = self.module
        if hasattr(m, "in_proj_qkvz") and self._joined is None:
            parts = m.in_proj_qkvz, m.in_proj_ba
            mixed, gates = (torch.arange(part.out_features)[None] for part in parts)
            order = self._apart(mixed, gates + mixed.shape[1])
            whole = torch.cat([part.weight.data for part in parts])
            self._joined = whole[torch.cat(order, 1)[0]]
            for part in parts:
                part.weight.data = part.weight.data.new_empty(0)
            return self._joined.numel() * self._joined.element_size()
        assert self.entry is self._joined
        return 0

    @property
    def _parts(self) -> tuple[nn.Linear, ...]:
        m = self.module
        return m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a

    def _between(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, states: LayerStates) -> Tensor:
        """Runs what lies between the products, from the results of `_project` to [T, heads * values]."""
        m, conv, recurrent = self.module, states.conv, states.recurrent
        assert conv is not None
        assert recurrent is not None
        norm = m.o_norm if hasattr(m, "o_norm") else m.norm
        kernels = takes_kernels(qkv, recurrent) and type(norm).__name__ in _NORMS_OF_QWEN
        at_once = states.packed.lengths is None and not states.packed.singly
        if kernels and at_once and takes_kernels(qkv, conv):
            from kvant.models.recurrent.delta_layer import delta_layer, fits
            from kvant.models.recurrent.stored import Stored

            state = Stored.of(recurrent)
            if fits(state, m.conv_kernel_size):
                weight = m.conv1d.weight[:, 0].contiguous()
                return delta_layer(
                    qkv, z, a, b, weight, m.conv1d.bias, m.A_log, m.dt_bias, norm.weight,
                    norm.variance_epsilon, conv.numbers, state, states.packed.rows,
                    states.packed.starts, self.key_heads, strongest=self.strongest,
                )  # fmt: skip
        out = self._recur(self.convolve(qkv, states), a, b, states).reshape(-1, self.values)
        if kernels:
            from kvant.models.recurrent.kernels import gated_norm

            alike = states.packed.singly
            normed = gated_norm(out, z, norm.weight, norm.variance_epsilon, alike=alike)
        else:
            normed = norm(out, z.reshape(-1, self.values))
        return normed.reshape(len(qkv), -1)

    @property
    def strongest(self) -> float:
        return 2.0 if getattr(self.module, "allow_neg_eigval", False) else 1.0

    def _recur(self, mixed: Tensor, a: Tensor, b: Tensor, states: LayerStates) -> Tensor:
        """Runs the delta rule with its gates: a, b [T, heads] -> [T, heads, values]."""

        def run(some: Sequence[Tensor], cache: StateCache, packed: Packed) -> Tensor:
            mixed, a, b = some
            return self._recurred(mixed, a, b, replace(states, recurrent=cache, packed=packed))

        assert states.recurrent is not None
        return in_turns(run, (mixed, a, b), states.recurrent, states.packed)

    def _recurred(self, mixed: Tensor, a: Tensor, b: Tensor, states: LayerStates) -> Tensor:
        """Implements `_recur` for a step without drafts."""
        m, packed, cache = self.module, states.packed, states.recurrent
        assert cache is not None
        strongest, kernels = self.strongest, takes_kernels(mixed, cache)
        if kernels and (packed.lengths is None or packed.singly):
            return self._step(mixed, a, b, cache, packed, strongest)
        if kernels and max(self.keys, self.values) <= _WIDEST:
            from kvant.models.recurrent.delta_chunks import delta_chunks
            from kvant.models.recurrent.stored import Stored

            out, chunks = mixed.new_empty(len(mixed), self.heads, self.values), packed.chunks(CHUNK)
            if chunks is not None:
                delta_chunks(
                    mixed, a, b, m.A_log, m.dt_bias, Stored.of(cache), packed, chunks, self.key_heads, out,
                    strongest=strongest,
                )  # fmt: skip
        else:
            g = -m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias.float())
            out = self.delta(mixed, g, b.sigmoid() * strongest, states, singles=not kernels)
        if kernels:
            singles = packed.singles
            if singles.shape[1]:
                self._step(mixed, a, b, cache, packed, strongest, singles, out)
        return out

    def _step(
        self, mixed: Tensor, a: Tensor, b: Tensor, cache: StateCache, packed: Packed, strongest: float,
        singles: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from kvant.models.recurrent.kernels import delta_step
        from kvant.models.recurrent.stored import Stored

        m = self.module
        return delta_step(
            mixed, a, b, m.A_log, m.dt_bias, Stored.of(cache), packed.rows, packed.starts, self.key_heads,
            strongest=strongest, singles=singles, out=out,
            cu_seqlens=packed.cu_seqlens if packed.singly else None,
        )  # fmt: skip

    def _project(self, x: Tensor, states: LayerStates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns inputs of the convolution [T, channels], gate [T, heads * values], b and a [T, heads]."""
        m = self.module
        if hasattr(m, "in_proj_qkv"):
            qkv, z, b, a = (_project(x, part, states) for part in self._parts)
            return qkv, z, b, a
        if hasattr(m, "in_proj_qkvz"):
            mixed, gates = (_project(x, part, states) for part in (m.in_proj_qkvz, m.in_proj_ba))
            return self._apart(mixed, gates)
        qkv = torch.cat([_project(x, part, states) for part in (m.q_proj, m.k_proj, m.v_proj)], 1)
        z, b, a = (_project(x, part, states) for part in (m.g_proj, m.b_proj, m.a_proj))
        return qkv, z, b, a

    def _apart(self, mixed: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the results of `_project` for Qwen3-Next, whose two projections are sorted by key head."""
        per_key = self.heads // self.key_heads
        by_head = mixed.view(len(mixed), self.key_heads, -1)
        wide = per_key * self.values
        q, k, v, z = torch.split(by_head, [self.keys, self.keys, wide, wide], 2)
        b, a = torch.split(gates.view(len(gates), self.key_heads, -1), per_key, 2)
        qkv = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
        return qkv, z.flatten(1), b.flatten(1), a.flatten(1)


class KimiDelta(_DeltaRule):
    """Kimi's delta attention (KDA), in which each key has its own decay."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, *(module.num_heads,) * 2, *(module.head_dim,) * 2)
        self._joined: Tensor | None = None

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Implements `Mixer.run`: x [T, hidden] -> [T, hidden]."""
        m, assembled = self.module, self._step(x, states)
        if assembled is None:
            qkv = torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], 1)
            mixed = self.convolve(qkv, states)
            out = self.delta(mixed, m.forget_gate(x[None])[0], m.b_proj(x).sigmoid(), states)
            gate = m.g_b_proj(m.g_a_proj(x)) if hasattr(m, "g_a_proj") else m.g_proj(x)
            gate = gate.unflatten(1, (self.heads, self.values))
            assembled = m.o_norm(out[None], gate[None])[0].flatten(1)
        found: Tensor = m.o_proj(assembled)
        return found

    def _step(self, x: Tensor, states: LayerStates) -> Tensor | None:
        """Returns the input of `o_proj`, [T, heads * values], from one kernel.

        None if it cannot run this step.
        """
        m, conv, recurrent = self.module, states.conv, states.recurrent
        assert conv is not None
        assert recurrent is not None
        serves = states.packed.lengths is None and hasattr(m, "g_a_proj")
        if not serves or not takes_kernels(x, recurrent) or not takes_kernels(x, conv):
            return None
        from kvant.models.recurrent.delta_layer import delta_layer, fits
        from kvant.models.recurrent.stored import Stored

        state, forget = Stored.of(recurrent), m.forget_gate
        parts = m.q_proj, m.k_proj, m.v_proj, m.b_proj, forget.f_a_proj, m.g_a_proj
        if not fits(state, m.conv_kernel_size):
            return None
        if all(type(part) is nn.Linear and part.bias is None for part in parts):
            if self._joined is None:
                self._joined = _join(parts)
            row = states.multiply(x, self._joined, None)
        else:
            row = torch.cat([part(x) for part in parts], 1)
        channels = 3 * self.heads * self.keys
        qkv, b, a, z = torch.split(row, [channels, self.heads, self.keys, self.keys], 1)
        weight = m.conv1d.weight[:, 0].contiguous()
        return delta_layer(
            qkv, m.g_b_proj(z), forget.f_b_proj(a), b, weight, m.conv1d.bias, forget.A_log, forget.dt_bias,
            m.o_norm.weight, m.o_norm.variance_epsilon, conv.numbers, state, states.packed.rows,
            states.packed.starts, self.key_heads, strongest=1.0, by_key=True,
        )  # fmt: skip


def _join(parts: Sequence[nn.Linear]) -> Tensor:
    """Joins the weights of layers without bias into [sum of outputs, inputs]; their weights become views."""
    joined = torch.cat([part.weight.data for part in parts])
    first = 0
    for part in parts:
        part.weight.data = joined[first : first + part.out_features]
        first += part.out_features
    return joined


class _Projected:
    """Base of mixers whose module has one projection in and one out, `in_proj` and `out_proj`."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def entry(self) -> Tensor:
        """Weight [outputs, hidden] of the first product, which computes the input of `between`."""
        weight: Tensor = self.module.in_proj.weight
        return weight

    @property
    def exit(self) -> Tensor:
        """Weight [hidden, inputs] of the last product, which takes the result of `between`."""
        weight: Tensor = self.module.out_proj.weight
        return weight


class Mamba2(_Projected):
    """Mamba2 of Bamba, Granite 4, Nemotron-H, Falcon-H1 and Zamba2."""

    @property
    def states(self) -> tuple[StateGeometry, ...]:
        m = self.module
        return (
            _conv_state(m.conv_kernel_size, m.conv_dim),
            _recurrent_state(m.num_heads, m.head_dim, m.ssm_state_size),
        )

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Implements `Mixer.run`: x [T, hidden] -> [T, hidden]."""
        m = self.module
        if hasattr(m, "ssm_in_multiplier"):  # Falcon-H1
            projected = _project(x * m.ssm_in_multiplier, m.in_proj, states) * m.mup_vector[0]
        else:
            projected = _project(x, m.in_proj, states)
        return _project(self.between(projected, states), m.out_proj, states)

    @property
    def is_framed(self) -> bool:
        """Whether both projections are plain: no format, biases or multipliers, an even number of rows."""
        m = self.module
        plain = (type(x) is nn.Linear and x.bias is None for x in (m.in_proj, m.out_proj))
        if hasattr(m, "ssm_in_multiplier") or not all(plain):
            return False
        return bool(m.in_proj.out_features % 2 == 0)

    def between(self, projected: Tensor, states: LayerStates) -> Tensor:
        """Implements `Framed.between`: [T, heads * values + channels + heads] -> [T, heads * values]."""
        assert states.conv is not None
        assert states.recurrent is not None
        m, conv = self.module, self.module.conv1d
        sizes = [m.intermediate_size, m.conv_dim, m.num_heads]
        gate, inner, dt = torch.split(projected, sizes, 1)
        kernels, packed = takes_kernels(projected, states.recurrent), states.packed
        if kernels and packed.lengths is None and not packed.singly:
            return self._step(gate, inner, dt, states.conv, states.recurrent, packed)
        inner = causal_conv(inner, conv.weight[:, 0], conv.bias, states.conv, packed, silu=True)
        if kernels and packed.singly and self._finishing is not None:
            return self._singly(gate, inner, dt, states.recurrent, packed, self._finishing)
        wide = m.n_groups * m.ssm_state_size
        value, b, c = torch.split(inner, [m.intermediate_size, wide, wide], 1)
        value = value.reshape(len(inner), m.num_heads, m.head_dim)
        b, c = (part.reshape(len(inner), m.n_groups, m.ssm_state_size) for part in (b, c))
        work = torch.promote_types(inner.dtype, torch.float32)
        dt = F.softplus(dt.to(work) + m.dt_bias.to(work)).clamp(*m.time_step_limit)
        value = value.to(work)
        out = scan(
            c, b, value * dt[..., None], -dt * m.A_log.to(work).exp(), None, states.recurrent,
            states.packed,
        )  # fmt: skip
        out = (out + m.D.to(work)[:, None] * value).to(inner.dtype).flatten(1)
        return self._finish(out, gate)

    def _step(
        self, gate: Tensor, inner: Tensor, dt: Tensor, conv: StateCache, recurrent: StateCache,
        packed: Packed,
    ) -> Tensor:  # fmt: skip
        """Implements `between` for one token of each sequence, on a GPU."""
        from kvant.models.recurrent.delta_layer import SIZE
        from kvant.models.recurrent.kernels import mamba_step
        from kvant.models.recurrent.mamba_layer import mamba_layer
        from kvant.models.recurrent.stored import Stored

        m, finish, state = self.module, self._finishing, Stored.of(recurrent)
        weight, bias = m.conv1d.weight[:, 0], m.conv1d.bias
        where = packed.rows, packed.starts
        if finish is None or weight.shape[1] != SIZE:
            mixed = causal_conv(inner, weight, bias, conv, packed, silu=True)
            out = mamba_step(
                mixed, dt, m.A_log, m.dt_bias, m.D, state, *where, m.n_groups, m.time_step_limit
            )
            return self._finish(out.flatten(1), gate)
        return mamba_layer(
            gate, inner, dt, weight.contiguous(), bias, m.A_log, m.dt_bias, m.D, conv.numbers, state, *where,
            m.n_groups, m.time_step_limit, finish,
        )  # fmt: skip

    def _singly(
        self, gate: Tensor, mixed: Tensor, dt: Tensor, recurrent: StateCache, packed: Packed,
        finish: Finish,
    ) -> Tensor:  # fmt: skip
        """Runs what follows the convolution one token after the other, on a GPU."""
        from kvant.models.recurrent.kernels import mamba_step
        from kvant.models.recurrent.mamba_layer import mamba_finish
        from kvant.models.recurrent.stored import Stored

        m = self.module

        def run(some: Sequence[Tensor], cache: StateCache, part: Packed) -> Tensor:
            mixed, dt = some
            return mamba_step(
                mixed, dt, m.A_log, m.dt_bias, m.D, Stored.of(cache), part.rows, part.starts, m.n_groups,
                m.time_step_limit, part.cu_seqlens,
            )  # fmt: skip

        out = in_turns(run, (mixed, dt), recurrent, packed).flatten(1)
        mamba_finish(out, gate, finish)
        return out

    @property
    def _finishing(self) -> Finish | None:
        """Parameters of `_finish` for kernels; None for a norm that they do not compute."""
        from kvant.models.recurrent.mamba_layer import Finish

        m = self.module
        if not getattr(m, "mamba_rms_norm", True):
            return Finish(None, m.intermediate_size, 0.0, gate_first=True, rounded=False)
        norm, name = m.norm, type(m.norm).__name__
        if name not in (*_ROUNDING_NORMS, "FalconH1RMSNormGated"):
            return None
        parts = getattr(norm, "n_groups", 1)
        return Finish(
            norm.weight,
            getattr(norm, "group_size", m.intermediate_size // parts),
            norm.variance_epsilon,
            gate_first=not getattr(norm, "norm_before_gate", False),
            rounded=name in _ROUNDING_NORMS,
        )

    def _finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gates and normalises out [T, heads * values]; gate: [T, heads * values]."""
        m, dtype = self.module, out.dtype
        has_norm = getattr(m, "mamba_rms_norm", True)  # Falcon-H1 may have none
        out = m.norm(out[None], gate[None])[0] if has_norm else out * F.silu(gate)
        return out.to(dtype)


class Mamba1:
    """Jamba's Mamba: each channel has its own state and decays."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def states(self) -> tuple[StateGeometry, ...]:
        m = self.module
        return (
            _conv_state(m.conv_kernel_size, m.intermediate_size),
            StateGeometry(StateKind.RECURRENT, (m.intermediate_size, m.ssm_state_size)),
        )

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Implements `Mixer.run`: x [T, hidden] -> [T, hidden]."""
        assert states.conv is not None
        assert states.recurrent is not None
        m, conv = self.module, self.module.conv1d
        inner, gate = m.in_proj(x).chunk(2, 1)
        inner = causal_conv(
            inner, conv.weight[:, 0], conv.bias, states.conv, states.packed, silu=True
        )
        sizes = [m.time_step_rank, m.ssm_state_size, m.ssm_state_size]
        dt, b, c = torch.split(m.x_proj(inner), sizes, 1)
        work = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(m.dt_proj(m.dt_layernorm(dt)).to(work))  # [T, channels]
        b, c = m.b_layernorm(b).to(work), m.c_layernorm(c).to(work)
        value, decay = inner.to(work), -m.A_log.to(work).exp()
        out = torch.empty_like(value)

        def make(there: slice) -> tuple[Tensor, Tensor]:
            step = dt[there, :, None]
            return (step * decay).exp(), step * value[there, :, None] * b[there, None]

        def use(there: slice, state: Tensor) -> None:
            out[there] = (state * c[there, None]).sum(-1)

        elementwise_scan(make, use, states.recurrent, states.packed)
        out = (out + value * m.D.to(work)) * F.silu(gate.to(work))
        mixed: Tensor = m.out_proj(out.to(x.dtype))
        return mixed


class LightningAttention:
    """MiniMax's linear attention: each head decays at a rate of its own, the same at every token."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def states(self) -> tuple[StateGeometry, ...]:
        m = self.module
        return (_recurrent_state(m.num_attention_heads, m.head_dim, m.head_dim),)

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Implements `Mixer.run`: x [T, hidden] -> [T, hidden]."""
        assert states.recurrent is not None
        m, count = self.module, len(x)
        qkv = m.act_fn(_project(x, m.qkv_proj, states))
        q, k, v = qkv.view(count, m.num_attention_heads, 3 * m.head_dim).chunk(3, 2)
        rates = m.get_slope_rate(device=x.device).flatten()
        g = -rates.expand(count, m.num_attention_heads)
        out = scan(q, k, v, g, None, states.recurrent, states.packed)
        out = m.norm(out.flatten(1).to(x.dtype))
        return _project(_project(x, m.output_gate, states).sigmoid() * out, m.out_proj, states)


class ShortConv(_Projected):
    """LFM2's gated convolution."""

    @property
    def states(self) -> tuple[StateGeometry, ...]:
        conv = self.module.conv
        return (_conv_state(conv.kernel_size[0], conv.in_channels),)

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Implements `Mixer.run`: x [T, hidden] -> [T, hidden]."""
        m = self.module
        return _project(self.between(_project(x, m.in_proj, states), states), m.out_proj, states)

    @property
    def is_framed(self) -> bool:
        """Whether both projections are unquantised, without biases."""
        m = self.module
        return all(type(x) is nn.Linear and x.bias is None for x in (m.in_proj, m.out_proj))

    def between(self, projected: Tensor, states: LayerStates) -> Tensor:
        """Implements `Framed.between`: projected [T, 3 * hidden] -> [T, hidden]."""
        assert states.conv is not None
        conv, packed = self.module.conv, states.packed
        at_once = packed.lengths is None and not packed.singly
        if at_once and takes_kernels(projected, states.conv):
            from kvant.models.recurrent.kernels import short_conv

            return short_conv(
                projected, conv.weight[:, 0].contiguous(), conv.bias, states.conv.numbers, packed.rows,
                packed.starts,
            )  # fmt: skip
        b, c, value = projected.chunk(3, 1)
        return c * causal_conv(
            b * value, conv.weight[:, 0], conv.bias, states.conv, packed, silu=False
        )


MIXERS: dict[str, Callable[[Any], Mixer]] = {
    **dict.fromkeys(
        ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet",
         "OlmoHybridGatedDeltaNet"), GatedDeltaNet,
    ),
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), KimiDelta),
    **dict.fromkeys(
        ("BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer",
         "Zamba2MambaMixer"), Mamba2,
    ),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), ShortConv),
    "JambaMambaMixer": Mamba1,
    "MiniMaxLightningAttention": LightningAttention,
}  # fmt: skip
"""Kvant's mixer for each class of transformers' modules."""

PAIRED = frozenset({"MiniMaxLightningAttention"})
"""Classes of modules whose forward returns a pair, of which the second is not used."""
