"""A layer's experts with weights in a narrow format; replaces transformers' module of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kvant.models.file_names import PRODUCTS
from kvant.models.fused.experts import Clamp, ExpertKernels, Experts, GateOrder, TorchExperts
from kvant.models.fused.routing import Routing
from kvant.weights.codecs import NarrowStack, NarrowWeight
from kvant.weights.format import WeightFormat
from kvant.weights.linear import awaited_tensors, named_tensors


def has_stacks(module: nn.Module) -> bool:
    """Whether a module holds experts: two stacks of weights."""
    stacks = [getattr(module, name, None) for name in PRODUCTS]
    return all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in stacks)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts that Kvant can replace: two stacks of weights, gated by SiLU."""
    if not has_stacks(module):
        return False
    activation = getattr(module, "act_fn", None)
    return hasattr(module, "alpha") or isinstance(activation, nn.SiLU) or _is_silu(activation)


def _is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLUActivation", "SiLU")


class NarrowExperts(nn.Module):
    """Experts of one layer. `put` sets the tensors, or a loader does if formats are given.

    gate_up_proj, down_proj: codes of all experts' rows; suffixes _scale and _zeros: see `NarrowWeight`.
    Biases keep transformers' names. alpha, limit: of a clamped activation, whose rows of gates and ups
    alternate. rounds: as in `Experts`.
    """

    def __init__(self, old: nn.Module, formats: tuple[WeightFormat, WeightFormat] | None) -> None:
        super().__init__()
        self.rounds = False
        first, second = (getattr(old, name) for name in PRODUCTS)
        # gpt-oss stores [E, in, out] and has a clamped activation.
        self.clamped = hasattr(old, "alpha")
        if self.clamped:
            self.alpha, self.limit = float(old.alpha), float(old.limit)  # type: ignore[arg-type]
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        self.shapes = {"gate_up_proj": tuple(first.shape), "down_proj": tuple(second.shape)}
        self.num_experts = int(first.shape[0])
        self.formats: dict[str, WeightFormat] = {}
        self._kernels: ExpertKernels | None = None
        for name in PRODUCTS:
            bias = getattr(old, f"{name}_bias", None)
            if bias is not None:
                self.register_parameter(f"{name}_bias", bias)
        for name, fmt in zip(PRODUCTS, formats or (), strict=False):
            count, rows, columns = self.shapes[name]
            self.formats[name] = fmt
            for part, tensor in awaited_tensors(name, fmt, count * rows, columns).items():
                self.register_parameter(part, tensor)

    @property
    def gate_up(self) -> NarrowStack:
        """Returns the stack [E, 2 I, H]."""
        return self._stack("gate_up_proj")

    @property
    def down(self) -> NarrowStack:
        """Returns the stack [E, H, I]."""
        return self._stack("down_proj")

    def _stack(self, name: str) -> NarrowStack:
        count, rows, columns = self.shapes[name]
        whole = NarrowWeight(
            self.formats[name], count * rows, columns, getattr(self, name),
            getattr(self, f"{name}_scale"), getattr(self, f"{name}_zeros", None),
        )  # fmt: skip
        return NarrowStack(whole, count)

    def put(self, name: str, stack: NarrowStack) -> None:
        """Sets the weights named by an entry of `PRODUCTS`: a stack of the same shape, in any format."""
        assert stack.shape == self.shapes[name]
        self.formats[name] = stack.whole.format
        for part, tensor in named_tensors(name, stack.whole).items():
            self.register_parameter(part, nn.Parameter(tensor, requires_grad=False))

    @property
    def order(self) -> GateOrder:
        return GateOrder.ALTERNATING if self.clamped else GateOrder.HALVES

    @property
    def clamp(self) -> Clamp | None:
        return Clamp(self.limit, self.alpha) if self.clamped else None

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Implements transformers' call of experts: hidden [T, H], ids and weights [T, top_k] -> [T, H]."""
        if self._kernels is None:
            self._kernels = _kernels_for(hidden)
        experts = Experts(
            Routing(self.num_experts, ids.shape[1]),
            (hidden.new_empty(0), None),
            (self.gate_up, getattr(self, "gate_up_proj_bias", None)),
            (self.down, getattr(self, "down_proj_bias", None)),
            self.order,
            self.clamp,
            rounds=self.rounds,
        )
        return self._kernels.apply_chosen(hidden, ids, weights, experts)

    def extra_repr(self) -> str:
        formats = ", ".join(fmt.summary for fmt in self.formats.values())
        return f"{self.num_experts} experts, {formats}"


def _kernels_for(x: Tensor) -> ExpertKernels:
    if x.device.type == "cuda":
        from kvant.models.fused.triton_experts import TritonExperts

        return TritonExperts(x.device)
    return TorchExperts()
