"""Planning's facts about a forward and about the model that it would run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry.weight_recipe import are_decoded, read_recipe
from kvant.models.quantization import Activations, Quantization
from kvant.models.stored import (
    Stored,
    declares_weights,
    decoded_here,
    gate_up_numel,
    read_blocks,
    read_stored,
    refuse_rounding,
)
from kvant.weights.format import MOST_DECODED


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """A model on a device, by which a forward decides whether it can run it.

    config: the model's config.json. quantization: how weights are rounded while they are loaded.
    batch_invariant: no row's result may depend on other rows. num_ranks: number of ranks that share it.
    matrices: the dtype in which its files store all matrices, None if they differ or nothing is known.
    rounds_for_experts: products with experts round activations in steps of many rows.
    """

    config: Mapping[str, Any]
    geometry: ModelGeometry
    compute: ComputeDtype
    device: DeviceFacts
    quantization: Quantization | None = None
    batch_invariant: bool = False
    num_ranks: int = 1
    matrices: ComputeDtype | None = None
    rounds_for_experts: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device.kind is DeviceKind.CPU

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the largest narrow weight after decoding, for products of many rows on a GPU.

        A rounded head is decoded in parts, and so are experts, which only Hopper GPUs decode, and not if they
        take rounded activations.
        """
        if not self.has_narrow:
            return 0
        text = self.config.get("text_config")
        inner = self.config.get("intermediate_size") or (text or {}).get("intermediate_size")
        if isinstance(inner, list):
            inner = max(inner)  # one for each layer
        hidden, layers = self.geometry.hidden_size, self.geometry.layers
        heads = max(
            (g.num_q_heads + 2 * g.num_kv_heads) * max(g.head_dim_k, g.head_dim_v) for g in layers
        )
        of_layers = hidden * max(heads, 2 * int(inner or 4 * hidden))
        rounds_head = self.quantization is not None and self.num_ranks == 1
        head = min(hidden * self.geometry.vocab_size, MOST_DECODED) if rounds_head else 0
        never = self.batch_invariant or self.rounds_for_experts
        decodes = self.device.arch == "sm_90" and not never
        experts = min(gate_up_numel(self.config), MOST_DECODED) if decodes else 0
        return 2 * max(of_layers, head, experts)

    @property
    def stored(self) -> Stored | None:
        """How the checkpoint's narrow weights run without being decoded; None if they are decoded."""
        if self.quantization is not None and read_blocks(self.config) is not None:
            return None  # blocks are decoded, then rounded as asked
        found = read_stored(self.config, self.device, self.compute)
        return found if isinstance(found, Stored) else None

    @property
    def refuse_rounding(self) -> str | None:
        """Why `--quantization` cannot replace this model's layers by narrow ones; None if it can."""
        if self.quantization is None:
            return None
        if self.on_cpu:
            return "on a CPU only the compiled forward multiplies with weights that Kvant rounds"
        if read_recipe(self.config) is not None:
            return "the checkpoint's weights are quantised already"
        if self.batch_invariant and self.quantization.rounds_activations:
            return "it rounds activations in steps of many rows alone"
        return refuse_rounding(self.config)

    @property
    def has_narrow(self) -> bool:
        """Whether linear layers have narrow weights that Kvant multiplies with."""
        return self.quantization is not None or self.stored is not None

    @property
    def kept_codes(self) -> str | None:
        """The method of weights that transformers keeps quantised in memory; None if there are none."""
        if not declares_weights(self.config) or self.stored is not None:
            return None
        if are_decoded(self.config, self.device) or decoded_here(self.config) is not None:
            return None
        return str(self.config["quantization_config"].get("quant_method", "an unnamed method"))


@dataclass(frozen=True, slots=True)
class ForwardInfo:
    """A forward's properties for planning.

    module: the module with `make(module, plan, choice) -> Forward`, which imports torch. refuse: returns
    why the forward cannot run the model, or None; it is pure and needs no device. extra_bytes: bytes
    on the device besides weights and activations. rounds_itself: it takes unrounded weights, and
    rounds them for `--quantization`.
    """

    name: str
    module: str
    refuse: Callable[[ForwardFacts], str | None]
    extra_bytes: Callable[[ForwardFacts], int] = lambda _: 0
    rounds_itself: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A forward that does not run the model, and why."""

    forward: str
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """The forward that runs a model, for the plan to show and the loader to make.

    info: None for a model that can be planned but not run. refused: the faster forwards. stored: how the
    checkpoint's narrow weights run without being decoded; None if they are decoded. activations: how products
    with narrow weights round activations; None for not at all. activations_because: describes the rounding
    and what decided it; "" if nothing did. matrices: the dtype that matrices keep in memory, None for the one
    that the model computes in.
    """

    info: ForwardInfo | None
    refused: tuple[Refused, ...] = ()
    extra_bytes: int = 0
    quantization: Quantization | None = None
    batch_invariant: bool = False
    stored: Stored | None = None
    activations: Activations | None = None
    activations_because: str = ""
    matrices: ComputeDtype | None = None

    @property
    def name(self) -> str | None:
        return None if self.info is None else self.info.name

    @property
    def rounds_itself(self) -> bool:
        return self.info is not None and self.info.rounds_itself
