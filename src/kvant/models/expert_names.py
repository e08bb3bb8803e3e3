"""Names in files that store each expert by itself: of experts' matrices, and of the layers beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How files name the matrices of experts that are stored one by one.

    owner: the files' name of the module above `experts`; "" for the name in transformers' model. shared: the
    files' name of `shared_experts`, "" for that name.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    owner: str = ""
    shared: str = ""

    def in_files(self, path: str) -> str:
        """Returns the path in files of a linear layer. path: of transformers' module, or in files."""
        return path.replace(_SHARED, f".{self.shared}.") if self.shared else path

    def of_module(self, path: str) -> str:
        """Returns the path of transformers' module for a layer's path in files."""
        return path.replace(f".{self.shared}.", _SHARED) if self.shared else path

    def of_product(self, product: str) -> tuple[str, ...]:
        """Returns the matrices whose rows follow one another in a stack, `gate_up_proj` or `down_proj`."""
        return (self.down,) if product == "down_proj" else (self.gate, self.up)

    def matrix(self, module: str, expert: int, part: str) -> str:
        """Returns the name of an expert's matrix. module: path of transformers' module of all experts."""
        if self.owner:
            layer = module.removesuffix(".experts").rpartition(".")[0]
            module = f"{layer}.{self.owner}.experts"
        return f"{module}.{expert}.{part}"


_SHARED = ".shared_experts."

AS_MODULES = ExpertNames()
"""Names below transformers' module of experts: N.gate_proj, N.up_proj and N.down_proj."""
