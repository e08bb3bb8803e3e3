"""Checks and reads experts' tensors that a checkpoint stores in a narrow format.

Kvant reads them itself, layer by layer, since transformers would stack them as wide weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import TensorEntry, read_headers
from kvant.models.file_names import FileNames
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.models.sharding.cuts import Cut, CutOfWhole, Rule
from kvant.models.sharding.narrow import cut_part
from kvant.models.stored import Stored
from kvant.weights.codecs import NarrowStack, NarrowWeight, can_join, decode, join
from kvant.weights.dialects import check_scales, read, read_experts, read_order
from kvant.weights.format import Dialect, Scheme
from kvant.weights.parts import Part, Role, check_part, expert_parts, parts_of


def read_tensor(file: Path, name: str, device: str = "cpu", cut: Cut | None = None) -> Tensor:
    """Reads a tensor [..] of a safetensors file, or only a rank's part of it."""
    with safe_open(file, "pt", device=device) as opened:
        if cut is None:
            found: Tensor = opened.get_tensor(name)
            return found
        source = opened.get_slice(name)
        at = (slice(None),) * (len(source.get_shape()) + cut.dim)
        return torch.cat([source[(*at, slice(start, end))] for start, end in cut.ranges], cut.dim)


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """All tensors of a directory, by name. entries: of their headers. files: that have them."""

    directory: Path
    entries: Mapping[str, TensorEntry]
    files: Mapping[str, Path]

    @staticmethod
    def of(directory: Path) -> TensorFiles:
        """Reads the headers in `directory`; there are no tensors without safetensors files."""
        entries: dict[str, TensorEntry] = {}
        files: dict[str, Path] = {}
        for header in read_headers(directory) or ():
            entries |= header.tensors
            files |= dict.fromkeys(header.tensors, header.path)
        return TensorFiles(directory, entries, files)

    def find(self, name: str, part: Part) -> TensorEntry | None:
        """Returns the header's entry of a tensor, None for an optional one that is absent.

        Raises BadCheckpoint for a missing one, and for another shape or dtype.
        """
        entry = self.entries.get(name)
        if entry is None:
            check_part(name, part, None, None)
            return None
        check_part(name, part, entry.dtype, tuple(entry.shape))
        return entry

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor [..] to the CPU."""
        return read_tensor(self.files[name], name)


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """A rank's part of each expert's matrix [rows, columns] in the files. cut: None for the whole."""

    rows: int
    columns: int
    cut: Cut | None

    @staticmethod
    def of(
        shape: tuple[int, int, int],
        parts: int,
        cut: CutOfWhole | None,
        *,
        turned: bool,
    ) -> ExpertCut:
        """Returns the part for one product. shape: of the rank's experts. parts: number of matrices joined by
        rows. cut: of the parameter of transformers' module, and its whole shape. turned: whether that shape's
        last two dimensions are swapped, compared with `shape`.
        """
        if cut is None:
            return ExpertCut(shape[1] // parts, shape[2], None)
        (_, rows, columns), dim = cut[1], cut[0].dim
        if turned:
            rows, columns, dim = columns, rows, -3 - dim
        ranges, width = cut[0].ranges, cut[0].width
        if cut[0].rule is Rule.EXPERT_PAIRED_OUTPUTS:
            ranges, width = ranges[:1], width // 2
        return ExpertCut(rows // parts, columns, Cut(cut[0].rule, dim, ranges, width))

    @property
    def held(self) -> tuple[int, int]:
        """Rows and columns of the rank's part."""
        if self.cut is None:
            return self.rows, self.columns
        if self.cut.dim == -2:
            return self.cut.length, self.columns
        return self.rows, self.cut.length

    def of_part(self, scheme: Scheme, short: str, shape: tuple[int, ...]) -> Cut | None:
        """Returns the cut of one expert's tensor [*shape], None for the whole tensor."""
        if self.cut is None:
            return None
        return cut_part(scheme, short, shape, (self.rows, self.columns), self.cut)

    def of_stack(self, scheme: Scheme) -> Cut | None:
        """Returns the cut of all experts' blocks or scales [experts, rows, groups, ..], None for all."""
        if self.cut is None or self.cut.dim == -2:
            return self.cut
        unit = scheme.format.columns
        ranges = tuple((start // unit, end // unit) for start, end in self.cut.ranges)
        return Cut(self.cut.rule, -1, ranges, self.columns // unit)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The places of the tensors of one layer's experts.

    name: of their module. names: of their matrices. schemes, cuts: by product. files, shapes: by a tensor's
    name.
    """

    name: str
    names: FileNames
    schemes: Mapping[str, Scheme]
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    cuts: Mapping[str, ExpertCut]

    @staticmethod
    def find(
        name: str,
        module: NarrowExperts,
        stored: Stored,
        tensors: TensorFiles,
        cut: Mapping[str, CutOfWhole],
    ) -> StoredExperts:
        """Finds and checks the tensors for `module`, by the files' headers. cut: as in `NarrowConfig`.

        Raises BadCheckpoint, naming the tensor, for missing ones and for other shapes or dtypes.
        """
        schemes: dict[str, Scheme] = {}
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        cuts: dict[str, ExpertCut] = {}
        for product, shape_of_rank in module.shapes.items():
            parts = stored.names.of_product(product)
            scheme = stored.scheme(stored.names.matrix(name, 0, parts[0]))
            assert scheme is not None, "all products are narrow if one is"
            count, is_joined = shape_of_rank[0], scheme.dialect is Dialect.MXFP4_EXPERTS
            found = cuts[product] = ExpertCut.of(
                shape_of_rank, 1 if is_joined else len(parts), cut.get(f"{name}.{product}"),
                turned=module.clamped,
            )  # fmt: skip
            rows, columns = found.rows, found.columns
            refusal = scheme.format.refuse(*found.held)
            if refusal is not None:
                raise BadCheckpoint(f"{name}.{product} cannot be stored as declared", why=refusal)
            schemes[product] = scheme
            if is_joined:
                wanted = {
                    f"{name}.{product}_{short}": part
                    for short, part in expert_parts(scheme, count, rows, columns).items()
                }
            else:
                wanted = {
                    f"{stored.names.matrix(name, expert, one)}.{short}": part
                    for expert in range(count)
                    for one in parts
                    for short, part in parts_of(scheme, rows, columns).items()
                }
            for full, part in wanted.items():
                entry = tensors.find(full, part)
                if entry is not None:
                    files[full], shapes[full] = tensors.files[full], tuple(entry.shape)
        return StoredExperts(name, stored.names, schemes, files, shapes, cuts)

    def read_into(self, module: NarrowExperts, device: torch.device) -> None:
        """Reads all weights to the device. Raises BadCheckpoint for scales and codes that are NaN or Inf."""
        for product, (count, rows, columns) in module.shapes.items():
            scheme, of = self.schemes[product], self.cuts[product]
            if scheme.dialect is Dialect.MXFP4_EXPERTS:
                full, held = f"{self.name}.{product}", of.of_stack(scheme)
                tensors = {
                    short: self._tensor(f"{full}_{short}", device, _at(held, dims))
                    for short, dims in (("blocks", 4), ("scales", 3))
                }
                module.put(product, read_experts(full, scheme, count, rows, columns, tensors))
                continue
            weights = list(self._read_apart(product, count, device))
            if not can_join(weights):
                raise BadCheckpoint(
                    f"{self.name}.{product}: experts have scales of different dtypes",
                    why="their weights are read as one",
                )
            module.put(product, NarrowStack(join(weights), count))

    def decode_into(
        self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]], device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Sets the stacks of transformers' module to the decoded weights, one matrix after another.

        shapes: of the stacks [experts, rows, columns]. Raises BadCheckpoint like `read_into`.
        """
        for product, shape in shapes.items():
            stack = torch.empty(shape, dtype=dtype, device=device)
            matrices = stack.view(-1, self.cuts[product].held[0], shape[2])
            for wide, narrow in zip(
                matrices, self._read_apart(product, shape[0], device), strict=True
            ):
                wide.copy_(decode(narrow, dtype))
            setattr(module, product, nn.Parameter(stack, requires_grad=False))

    def _read_apart(self, product: str, count: int, device: torch.device) -> Iterator[NarrowWeight]:
        """Yields the matrices of a product that is stored apart, in the order of the stack's rows."""
        for expert in range(count):
            for one in self.names.of_product(product):
                layer = self.names.matrix(self.name, expert, one)
                yield self._read_one(layer, self.schemes[product], self.cuts[product], device)

    def _read_one(
        self, layer: str, scheme: Scheme, of: ExpertCut, device: torch.device
    ) -> NarrowWeight:
        tensors: dict[str, Tensor] = {}
        for short, part in parts_of(scheme, of.rows, of.columns).items():
            full = f"{layer}.{short}"
            if full in self.files:
                if part.role is Role.ORDER:
                    read_order(full, self._tensor(full, device), scheme)
                cut = of.of_part(scheme, short, self.shapes[full])
                tensors[short] = self._tensor(full, device, cut)
                if part.is_scale:
                    check_scales(full, tensors[short])
        return read(layer, scheme, *of.held, tensors)

    def _tensor(self, name: str, device: torch.device, cut: Cut | None = None) -> Tensor:
        return read_tensor(self.files[name], name, str(device), cut)


def _at(cut: Cut | None, num_dims: int) -> Cut | None:
    """Converts a cut of rows (dim -2) or groups (-1) to the dimensions of [experts, rows, groups, ..]."""
    return None if cut is None else replace(cut, dim=(1 if cut.dim == -2 else 2) - num_dims)
