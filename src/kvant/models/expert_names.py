"""Names of experts' matrices in files that store each expert by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How files name the matrices of experts that are stored one by one.

    owner: the files' name of the module above `experts`; "" for the name in transformers' model.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    owner: str = ""

    def of_product(self, product: str) -> tuple[str, ...]:
        """Returns the matrices whose rows follow one another in a stack, `gate_up_proj` or `down_proj`."""
        return (self.down,) if product == "down_proj" else (self.gate, self.up)

    def matrix(self, module: str, expert: int, part: str) -> str:
        """Returns the name of an expert's matrix. module: path of transformers' module of all experts."""
        if self.owner:
            layer = module.removesuffix(".experts").rpartition(".")[0]
            module = f"{layer}.{self.owner}.experts"
        return f"{module}.{expert}.{part}"


AS_MODULES = ExpertNames()
"""Names below transformers' module of experts: N.gate_proj, N.up_proj and N.down_proj."""
