"""Builds the tiers of an engine's pages, and the identity that pages carry outside its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvant.errors import DoesNotFit, NotServable, WayOut
from kvant.kv.identity import PageIdentity, digest_of
from kvant.kv.memory import format_size
from kvant.kv.offload.config import OffloadConfig
from kvant.kv.pages import CacheIdentity, SharedPages
from kvant.plan.device import free_host_bytes
from kvant.plan.plan import Plan, PlannedModel, PlanRequest

if TYPE_CHECKING:
    from kvant.execution.runner import ModelRunner
    from kvant.kv.offload.tiers import Tiers
    from kvant.kv.transfer.config import TransferConfig
    from kvant.kv.transfer.exchange import Give, Takers
    from kvant.parallel.offload import SpreadPages

_ROTARY = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "rope_local_base_freq",
)


def check_tiers(planned: Plan, config: OffloadConfig, *, is_launched: bool) -> None:
    """Raises DoesNotFit if the host tier is larger than the free host memory.

    is_launched: whether torchrun started the ranks. Raises NotServable if they would keep files.
    """
    if is_launched and config.disk is not None:
        raise NotServable(
            "--kv-offload disk:.. is not offered with --rank-launcher torchrun",
            why="ranks may be on other machines, whose files nothing counts or removes together",
            ways_out=(
                WayOut("keep pages in memory alone", ("--kv-offload", f"host:{config.host_bytes}")),
            ),
        )
    free = free_host_bytes()
    if planned.request.on_cpu:
        free -= (planned.weights_bytes or 0) + (planned.memory.kv_bytes or 0)
    if config.host_bytes > free:
        raise DoesNotFit(
            f"{format_size(config.host_bytes)} of host memory are not available for evicted pages",
            why=f"{format_size(max(0, free))} are free beside what the engine needs",
            ways_out=(WayOut("offload to less", ("--kv-offload", f"host:{max(1, free // 2)}")),),
        )


def make_tiers(
    planned: Plan, runner: ModelRunner, *, dummy_weights: bool
) -> tuple[Callable[[SharedPages], Tiers] | None, CacheIdentity | None]:
    """Returns a builder of the requested tiers, and the identity of pages that leave this process.

    Both are None without tiers. The identity is None if pages go neither to files nor to other engines.
    Raises ConfigError if the directory or the host memory cannot be used, or NIXL is missing.
    """
    config = planned.request.offload
    if config is None:
        return None, None
    from kvant.kv.offload.build import build_tiers
    from kvant.kv.offload.mover import pieces_of
    from kvant.kv.offload.page_files import PageFiles
    from kvant.kv.offload.sessions import pinned_names

    files, identity, found = None, None, None
    transfer = planned.request.transfer
    if config.disk is not None or transfer is not None:
        found = page_identity(planned, runner, dummy_weights=dummy_weights)
        identity = CacheIdentity("pages", None, found.digest.hex())
        if config.disk is not None:
            files = PageFiles(config.disk.path, found, config.disk.num_bytes, pinned=pinned_names)
        if transfer is not None:
            from kvant.kv.transfer.memory import require_nixl

            require_nixl()
    pieces = pieces_of(runner.pools)
    spread: SpreadPages | None = None
    if planned.num_ranks > 1:
        from kvant.parallel.offload import SpreadPages
        from kvant.parallel.runner import RankedRunner

        assert isinstance(runner, RankedRunner)
        spread = SpreadPages(runner.ranks, files, found)
    peers, give = None, None
    if transfer is not None:
        assert found is not None
        peers, give = _exchange(planned, transfer, found, runner, spread)

    def tiers(shared: SharedPages) -> Tiers:
        return build_tiers(
            shared,
            pieces,
            config.host_bytes // planned.num_ranks,
            files=files,
            peers=peers,
            give=give,
            spread=spread,
        )

    return tiers, identity


def _exchange(
    planned: Plan, config: TransferConfig, identity: PageIdentity, runner: ModelRunner,
    spread: SpreadPages | None,
) -> tuple[Takers | None, Give | None]:  # fmt: skip
    from kvant.kv.transfer.exchange import exchange

    page_size, fingerprint = planned.target.kv.page_size, planned.target.geometry.fingerprint
    if spread is None:
        return exchange(config, identity, runner.pools, page_size, fingerprint=fingerprint)
    from kvant.parallel.runner import RankedRunner
    from kvant.parallel.transfer import RankedPeer

    assert isinstance(runner, RankedRunner)
    ranks = runner.ranks
    return exchange(
        config, identity, runner.pools, page_size,
        fingerprint=fingerprint,
        others=lambda: spread.parts,
        spread=lambda number, own: RankedPeer(number, own, ranks),
    )  # fmt: skip


def page_identity(
    planned: Plan, runner: ModelRunner, *, dummy_weights: bool = False
) -> PageIdentity:
    """Returns the identity of rank 0's pages outside of its process. Reads the model's files."""
    from kvant.kv.offload.pool_identity import layout_of_pages, scales_beside_pages

    target, draft, request = planned.target, planned.draft, planned.request
    return PageIdentity(
        weights=_weights(target, dummy_weights),
        weight_format=_weight_format(request),
        formats=f"{target.kv.compute_dtype.value} {target.kv.fingerprint}",
        scales=scales_beside_pages(runner.pools),
        rotary=_rotary(planned),
        layout=layout_of_pages(runner.pools, target.kv.page_size, 0, planned.num_ranks),
        draft="none"
        if draft is None
        else f"{draft.kv.fingerprint} {_weights(draft, dummy_weights)}",
        arithmetic=_arithmetic(planned, runner) if request.batch_invariant else "",
    )


def _weight_format(request: PlanRequest) -> str:
    """Returns the weights' format, and the activations' format if activations are rounded."""
    found = "stored" if request.quantization is None else request.quantization.value
    if request.activations is not None:
        found += f", {request.activations.value} activations"
    return found


def _weights(model: PlannedModel, dummy_weights: bool) -> str:
    config = {k: v for k, v in model.config.items() if k not in _NOT_THE_MODEL}
    from kvant.models.contents import contents_digest

    contents = "random" if dummy_weights else contents_digest(model.local.path)
    return f"{contents} {digest_of(config)}"


_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures")


def _rotary(planned: Plan) -> str:
    text = planned.target.config.get("text_config", planned.target.config)
    length = "" if planned.rotary_length is None else f" at {planned.rotary_length}"
    return digest_of([text.get(name) for name in _ROTARY]) + length


def _arithmetic(planned: Plan, runner: ModelRunner) -> str:
    """Names all that affects a value's last bit: device, forward, attention backends, torch's version."""
    import torch

    device = planned.request.device
    name = "" if runner.device.type == "cpu" else torch.cuda.get_device_name(runner.device)
    backends = sorted({layer.backend or "" for layer in planned.target.kv.layers})
    parts = (device.kind.value, name, planned.forward.name, *backends, torch.__version__)
    return " ".join(str(part) for part in parts)
