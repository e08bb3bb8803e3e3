"""How files name layers and experts, where they differ from transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass

PRODUCTS = ("gate_up_proj", "down_proj")
"""transformers' stacks of the matrices of a layer's experts."""


@dataclass(frozen=True, slots=True)
class FileNames:
    """How files name layers, and the matrices of experts that are stored one by one.

    gate, up, down: an expert's matrices. owner: the module above `experts`; "" for the name in transformers'
    model. shared: what transformers calls `shared_experts`; "" for that name. layers: the place of the
    decoder's layers, which transformers' model has at `model.layers`; "" for the same place.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    owner: str = ""
    shared: str = ""
    layers: str = ""

    def in_files(self, path: str) -> str:
        """Returns the path in files of a module's path in transformers' model, or of a path in files."""
        if self.shared:
            path = path.replace(_SHARED, f".{self.shared}.")
        if self.layers and path.startswith(_LAYERS):
            path = f"{self.layers}.{path.removeprefix(_LAYERS)}"
        return path

    def of_module(self, path: str) -> str:
        """Returns the path of transformers' module for a path in files."""
        if self.shared:
            path = path.replace(f".{self.shared}.", _SHARED)
        if self.layers and path.startswith(f"{self.layers}."):
            path = _LAYERS + path.removeprefix(f"{self.layers}.")
        return path

    def of_product(self, product: str) -> tuple[str, ...]:
        """Returns the matrices whose rows follow one another in a stack of `PRODUCTS`."""
        return (self.down,) if product == "down_proj" else (self.gate, self.up)

    def matrix(self, module: str, expert: int, part: str) -> str:
        """Returns the name of an expert's matrix. module: path of transformers' module of all experts."""
        if self.owner:
            layer = module.removesuffix(".experts").rpartition(".")[0]
            module = f"{layer}.{self.owner}.experts"
        return f"{self.in_files(module)}.{expert}.{part}"


_SHARED, _LAYERS = ".shared_experts.", "model.layers."

AS_MODULES = FileNames()
"""Names below transformers' module of experts: N.gate_proj, N.up_proj and N.down_proj."""
