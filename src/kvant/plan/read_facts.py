"""Reading the facts of a plan: the only part of planning that touches files, hub and device."""

from __future__ import annotations

from kvant.attention.need import DeviceFacts
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.json_file import read_json_object
from kvant.kv.checkpoint.read import read_checkpoint
from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.models.directory import CONFIG_NAME
from kvant.models.geometry import read_draft_geometry, read_geometry
from kvant.models.geometry.families import is_drafter
from kvant.models.geometry.weight_methods import refuse_weights
from kvant.models.geometry.weight_recipe import are_decoded
from kvant.models.local import LocalModel, ModelSource, Progress
from kvant.models.locate import locate
from kvant.models.weights import read_stored_weights
from kvant.plan.device import device_memory
from kvant.plan.facts import Facts, ModelFacts
from kvant.plan.plan import PlanRequest
from kvant.speculative.dflash.files import check_files


def read_facts(
    request: PlanRequest,
    *,
    memory: bool = False,
    weights: bool = False,
    known: Facts | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Read everything that planning `request` needs. Imports no torch for a CPU.

    memory: measure this machine's memory. weights: fetch or convert the weights, because they will be
    loaded; progress is told about that. known: facts of the same request, read without weights; models
    that have not changed since are not read again. Raises ConfigError for missing or broken files.
    """

    def model(name: str, revision: str | None, before: ModelFacts | None) -> ModelFacts:
        if weights and before is not None and before.refusal is not None:
            raise before.refusal  # before a download
        local = locate(name, revision=revision, weights=weights, progress=progress)
        if before is not None and before.local == local and before.weights.by_dtype is not None:
            return before
        found = _read_model(local, request.device)
        if weights and found.refusal is not None:
            raise found.refusal
        return found

    target = model(request.model, request.revision, None if known is None else known.target)
    draft = None
    asked = request.speculative
    if asked is not None and asked.method.has_model:
        draft = model(asked.model, asked.revision, None if known is None else known.draft)
        if weights:
            geometry, facts = read_draft_geometry(draft.config, read_geometry(target.config))
            check_files(draft.local.path, draft.config, geometry, facts)
    if known is not None:
        return Facts(target, draft, known.memory)
    return Facts(target, draft, device_memory(request.device) if memory else None)


def _read_model(local: LocalModel, device: DeviceFacts) -> ModelFacts:
    config = read_json_object(local.path / CONFIG_NAME)
    headers = read_headers(local.path)
    if local.source in (ModelSource.GGUF, ModelSource.DEMO):
        checkpoint = CheckpointKV(checked=True)  # says nothing about KV, converted yet or not
    else:
        checkpoint = read_checkpoint(local.path, config, headers)
    weights = read_stored_weights(local.path, config, headers)
    refusal = None if is_drafter(config) else refuse_weights(config, local.path, device)
    return ModelFacts(local, config, checkpoint, weights, are_decoded(config, device), refusal)
