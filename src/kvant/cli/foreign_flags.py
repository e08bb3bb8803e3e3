"""Flags of `vllm serve` that `kvant serve` lacks. Each is replaced, ignored or refused, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvant.errors import BadValue, WayOut
from kvant.kv.checkpoint.json_file import parse_option_object


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag of another program.

    takes_value: a value follows it. becomes: arguments that replace the flag, before its value. convert:
    converts the value. no_effect: why it is ignored. refused: why it cannot be served. neutral: values that
    are ignored instead of replaced or refused. way_out: of a refusal.
    """

    takes_value: bool = False
    becomes: tuple[str, ...] = ()
    convert: Callable[[str], str] = str
    no_effect: str = ""
    refused: str = ""
    neutral: tuple[str, ...] = ()
    way_out: WayOut | None = None


_TEXT_ONLY = "the server takes and writes text only"
_DIVIDED = (
    "--tensor-parallel-size divides a model, also its experts, over the devices of one machine"
)
_TENSOR_PARALLEL = WayOut("divide the model over devices of one machine: --tensor-parallel-size N")
_NO_SCORES = "a model generates or embeds"
_LOG = "a line for each request is printed with --log-requests only"
_MERGE = WayOut("merge the adapter into the weights first (peft: merge_and_unload)")
_PROXY = WayOut("put a proxy in front")
_TRANSFER = WayOut(
    "prefill in one server, decode in another: --kv-transfer give:HOST:PORT, take:.."
)
_OFFLOAD = WayOut("keep pages in host memory and files: --kv-offload host:SIZE,disk:DIR:SIZE")

_NO_EFFECT: Mapping[str, str] = {
    "CUDA graphs change no answer; Kvant decides where it uses them":
        "--enforce-eager --cudagraph-capture-sizes= --max-cudagraph-capture-size= --max-seq-len-to-capture= "
        "--cudagraph-metrics",
    "prompts are always computed in chunks": "--enable-chunked-prefill",
    _LOG:
        "--disable-log-requests --no-enable-log-requests --max-log-len= --disable-uvicorn-access-log "
        "--uvicorn-log-level= --disable-access-log-for-endpoints= --enable-log-outputs --enable-log-deltas "
        "--log-error-stack --log-level= --log-config-file= --logging-config= --aggregate-engine-logging "
        "--enable-logging-iteration-details --use-tqdm-on-load --enable-trace-replay",
    "statistics are at /metrics":
        "--disable-log-stats --kv-cache-metrics --kv-cache-metrics-sample= --enable-mfu-metrics "
        "--show-hidden-metrics-for-version= --enable-server-load-tracking --enable-per-request-metrics "
        "--per-request-spec-decode-metrics --custom-histogram-buckets=",
    "Kvant never runs code of a checkpoint": "--trust-remote-code --code-revision=",
    "steps are always scheduled ahead": "--async-scheduling",
    "Kvant compiles nothing of a model": "--compilation-config= --optimization-level=",
    "Kvant chooses its kernels by what it verifies and measures":
        "--moe-backend= --linear-backend= --attention-config= --kernel-config= --enable-flashinfer-autotune "
        "--disable-flashinfer-autotune --ir-op-priority= --monokernel --mamba-backend= "
        "--mamba-ssu-algorithm= --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= "
        "--sparse-indexer-topk-backend= --disable-cascade-attn --disable-custom-all-reduce "
        "--all2all-backend= --performance-mode= "
        "--specialize-active-lora --model-impl= --enable-layerwise-nvtx-tracing --jit-monitor-mode= "
        "--jit-monitor-verbose --use-fp64-gumbel --additional-config= "
        "--use-replayssm --replayssm-buffer-len= --enable-shm-tensor-arena --fail-on-environ-validation "
        "--allow-deprecated-quantization",
    "a preempted sequence is computed again": "--swap-space=",
    "replicas of an engine run under Ray, which places them":
        "--data-parallel-backend= --data-parallel-size-local=",
    "the processes of one machine's devices are started by Kvant":
        "--distributed-executor-backend= --max-parallel-loading-workers= --distributed-timeout-seconds= "
        "--cpu-distributed-timeout-seconds= --numa-bind --numa-bind-nodes= --numa-bind-cpus= "
        "--ray-workers-use-nsight --api-server-count=",
    _DIVIDED:
        "--enable-expert-parallel --enable-ep-weight-filter --expert-placement-strategy= --enable-eplb "
        "--eplb-config= --num-redundant-experts=",
    _TEXT_ONLY:
        "--limit-mm-per-prompt= --mm-processor-kwargs= --mm-processor-cache-gb= --mm-processor-cache-type= "
        "--mm-encoder-tp-mode= --mm-encoder-attn-backend= --mm-encoder-attn-dtype= "
        "--mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= "
        "--mm-shm-cache-max-object-size-mb= --mm-tensor-ipc= --mm-ipc-gpu-memory-gb= --mm-processor-device= "
        "--mm-device-do-normalize --mm-hasher-algorithm= --media-io-kwargs= --language-model-only "
        "--disable-chunked-mm-input --interleave-mm-strings --skip-mm-profiling --video-pruning-rate= "
        "--video-pruning-method= --allowed-local-media-path= --allowed-media-domains= "
        "--trust-request-mm-kwargs --renderer-num-workers=",
    "tools are not shown to the model with tool_choice none": "--exclude-tools-when-tool-choice-none",
    "--allowed-origins decides which pages may ask; they send the key in a header":
        "--allow-credentials --allowed-methods= --allowed-headers=",
    "requests may always be token ids": "--skip-tokenizer-init",
    "usage always has the details": "--enable-prompt-tokens-details",
    "/tokenizer_info is always there": "--enable-tokenizer-info-endpoint",
    "X-Request-Id is always returned": "--enable-request-id-headers",
    "each kind of layer has a group of pages of its own":
        "--disable-hybrid-kv-cache-manager --kv-sharing-fast-prefill",
    "cached states and pages go when their room is needed":
        "--mamba-cache-mode= --mamba-block-size= --enable-mamba-shared-prefix-checkpoint "
        "--prefix-cache-retention-interval= --prefix-match-unit= --prefix-caching-hash-algo=",
    "a stream gets the text of each step": "--stream-interval=",
    "--max-num-batched-tokens bounds each step":
        "--scheduler-reserve-full-isl --long-prefill-token-threshold= --prefill-schedule-interval= "
        "--max-num-partial-prefills= --max-long-partial-prefills= --ubatch-size= "
        "--long-prefill-token-threshold-adaptive --enable-batch-sharded-sampling "
        "--max-num-scheduled-tokens= --max-num-active-seqs=",
    "the files of a model are read at their best":
        "--model-loader-extra-config= --safetensors-load-strategy= --safetensors-prefetch-num-threads= "
        "--safetensors-prefetch-block-size= --pt-load-map-location= --ignore-patterns=",
    "the chat template tells how the model writes reasoning and tool calls":
        "--enable-auto-tool-choice --tool-call-parser= --reasoning-parser= --reasoning-config= "
        "--reasoning-parser-plugin= --tool-parser-plugin= --tool-call-parser-plugin=",
    "the server's only pages are / and /openapi.json": "--disable-fastapi-docs --enable-offline-docs",
    "limits of headers are --max-header-bytes and --max-header-count":
        "--h11-max-incomplete-event-size= --h11-max-header-count=",
}  # fmt: skip
"""Reason -> flags that are ignored for it. A flag with `=` takes a value."""

_REFUSED: Mapping[str, tuple[str, WayOut | None]] = {
    "one process per device of one machine serves": (
        "--nnodes= --node-rank= --master-addr= --master-port= --headless "
        "--data-parallel-rank= --data-parallel-start-rank= --data-parallel-address= "
        "--data-parallel-rpc-port= --data-parallel-hybrid-lb "
        "--data-parallel-external-lb --data-parallel-supervisor-port= "
        "--data-parallel-multi-port-external-lb --elastic-ep-max-dp-size= "
        "--enable-elastic-ep --enable-fault-tolerance --fault-tolerance-config= --dp-sync-interval= "
        "--disable-nccl-for-dp-synchronization --decode-context-parallel-size= "
        "--prefill-context-parallel-size= --dcp-comm-backend= --dcp-q-replicate "
        "--dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size= --enable-dbo "
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --enable-hc-sp",
        _TENSOR_PARALLEL,
    ),
    "KV cache pages are not sent to other engines": (
        "--ec-transfer-config= --ec-manager-config= --enable-scale-out --tokens-only",
        _OFFLOAD,
    ),
    "LoRA adapters are not offered": (
        "--enable-lora --lora-modules= --max-loras= --max-cpu-loras= --max-lora-rank= --lora-dtype= "
        "--lora-target-modules= --lora-extra-vocab-size= --max-lora-cls-labels= --fully-sharded-loras "
        "--default-mm-loras= --enable-tower-connector-lora --enable-moe-shared-loras "
        "--enable-mixed-moe-lora-format",
        _MERGE,
    ),
    "there is no TLS": (
        "--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-cert-reqs= --ssl-ciphers= --enable-ssl-refresh",
        _PROXY,
    ),
    "paths begin at /": ("--root-path= --uds= --grpc --grpc-port=", _PROXY),
    "weights stay as they are on their device": (
        "--offload-backend= --offload-group-size= --offload-num-in-group= --offload-prefetch-step= "
        "--offload-params= --cpu-offload-params= --enable-sleep-mode --sleep-mode-backend= "
        "--sleep-mode-offload-cudagraph --sleep-preserve-parameter-names= --enable-nccl-comm-suspend "
        "--weight-transfer-config= --engram-config= --enable-cumem-allocator",
        WayOut("round the weights while loading: --quantization int4"),
    ),
    "no code of users runs in the server": (
        "--logits-processors= --io-processor-plugin= --middleware= --worker-cls= --worker-extension-cls= "
        "--scheduler-cls= --model-class-overrides= --tool-server=",
        None,
    ),
    "requests are texts or token ids": (
        "--enable-prompt-embeds --enable-mm-embeds --mm-encoder-only",
        None,
    ),
    "answers are text; embeddings come from /v1/embeddings where a model has them": (
        "--pooler-config= --enable-flash-late-interaction",
        None,
    ),
    "states are rounded to the nearest value": (
        "--enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds=",
        WayOut("store states with more bits: --state-dtype float32"),
    ),
    "a chat template belongs to the server, not to a request": (
        "--trust-request-chat-template",
        WayOut("name the template at the start: --chat-template FILE"),
    ),
    "usage is sent to streams that ask for it": (
        "--enable-force-include-usage",
        WayOut('ask for it: "stream_options": {"include_usage": true}'),
    ),
    "pages follow from memory": (
        "--num-gpu-blocks-override=",
        WayOut("give the memory: --kv-cache-memory SIZE"),
    ),
    "a layer's window is a part of the model": ("--disable-sliding-window", None),
    "answers are text, token ids and log-probabilities": (
        "--watermark= --watermark-config= --return-sampling-mask --enable-return-routed-experts "
        "--aux-output-config= --fingerprint-mode= --fingerprint-value=",
        None,
    ),
    "parameters belong to a request": (
        "--reasoning-effort-map= --tool-strict-level= --return-tokens-as-token-ids "
        "--anthropic-disabled-thinking-effort=",
        WayOut("set them in requests"),
    ),
    "traces are not sent": (
        "--otlp-traces-endpoint= --collect-detailed-traces= --profiler-config=",
        WayOut("measure with --log-requests, /metrics and `kvant bench`"),
    ),
    "formats of weights are named by --quantization": (
        "--quantization-config= --quantization-param-path=",
        WayOut("round the weights while loading: --quantization fp8"),
    ),
    "images, audio and video are not made here": (
        "--omni --num-gpus= --usp= --ring= --ulysses-degree= --cfg-parallel-size= --vae-parallel-mode= "
        "--vae-patch-parallel-size= --vae-use-tiling --vae-use-slicing --use-hsdp --hsdp-shard-size= "
        "--text-encoder-tp-size= --diffusion-attention-backend= --diffusion-config= --deploy-config= "
        "--task-type= --init-timeout= --stage-init-timeout= --enable-cpu-offload --model-class-name= "
        "--enable-distributed-layerwise-offload --dlo-resident-layers= --dlo-no-use-allgather "
        "--no-async-chunk --stage-configs-path=",
        None,
    ),
}
"""Reason -> flags that are refused for it, and the way out."""


def _listed(flags: str, **parts: object) -> dict[str, Foreign]:
    return {
        flag.rstrip("="): Foreign(flag.endswith("="), **parts)  # type: ignore[arg-type]
        for flag in flags.split()
    }


def _offload(value: str) -> str:
    """Converts the host memory of vLLM's OffloadingConnector. Raises BadValue for other connectors."""
    given = parse_option_object(value, asked_by="--kv-transfer-config")
    extra = given.get("kv_connector_extra_config") or {}
    if given.get("kv_connector") != "OffloadingConnector" or "secondary_tiers" in extra:
        raise BadValue(
            f"--kv-transfer-config {value} is not served",
            why="KV cache pages are not sent to other engines' stores, only from Kvant to Kvant",
            ways_out=(_OFFLOAD, _TRANSFER),
        )
    if not (size := extra.get("cpu_bytes_to_use")):
        raise BadValue(
            f"--kv-transfer-config {value} is not served",
            why="it does not say how much host memory the pages get",
            ways_out=(_OFFLOAD,),
        )
    return f"host:{size}"


def _task(value: str) -> str:
    """Converts vLLM's runner or conversion to Kvant's task. Raises BadValue."""
    tasks = {"generate": "generate", "pooling": "embed", "embed": "embed"}
    if value not in tasks:
        raise BadValue(
            f"{value} is not served",
            why=_NO_SCORES,
            ways_out=(WayOut("embed texts with a model", ("--task", "embed")),),
        )
    return tasks[value]


def _gibibytes(value: str) -> str:
    return f"host:{value}GiB"


def _events(value: str) -> str:
    """Converts vLLM's JSON to Kvant's `ENDPOINT[,replay=..][,topic=..]`. Raises BadValue."""
    given = parse_option_object(value, asked_by="--kv-events-config")
    parts = [str(given.get("endpoint", "tcp://*:5557"))]
    parts += [f"replay={given['replay_endpoint']}"] if given.get("replay_endpoint") else []
    parts += [f"topic={given['topic']}"] if given.get("topic") else []
    return ",".join(parts)


VLLM: Mapping[str, Foreign] = {
    **{k: v for why, flags in _NO_EFFECT.items() for k, v in _listed(flags, no_effect=why).items()},
    **{
        flag: one
        for why, (flags, way) in _REFUSED.items()
        for flag, one in _listed(flags, refused=why, way_out=way).items()
    },
    # Another name
    "--enable-log-requests": Foreign(becomes=("--log-requests",)),
    "--disable-prefix-caching": Foreign(becomes=("--no-enable-prefix-caching",)),
    "--device-memory-utilization": Foreign(True, becomes=("--gpu-memory-utilization",)),
    "--max-logprobs": Foreign(True, becomes=("--max-top-logprobs",)),
    "--sse-keep-alive-interval": Foreign(True, becomes=("--ping-interval",)),
    "--kv-cache-memory-bytes": Foreign(True, becomes=("--kv-cache-memory",)),
    "--kv-offloading-size": Foreign(True, becomes=("--kv-offload",), convert=_gibibytes),
    "--kv-events-config": Foreign(True, becomes=("--kv-events",), convert=_events),
    # Some values
    "--kv-offloading-backend": Foreign(
        True, no_effect="Kvant moves the pages itself", refused="Kvant moves the pages itself",
        neutral=("native", ""),
    ),
    "--tokenizer-mode": Foreign(
        True, no_effect="tokenizer.json is read, and the chat template or --chat-template renders messages",
        refused="no other tokenizer is offered",
        neutral=("auto", "hf", "fast", "mistral", "slow", "deepseek_v32", "deepseek_v4", "inkling"),
    ),
    "--config-format": Foreign(
        True, no_effect="config.json is read", refused="config.json is read",
        neutral=("auto", "hf", "mistral"),
    ),
    "--chat-template-content-format": Foreign(
        True, no_effect="text parts are joined", refused="text parts are joined into one text",
        neutral=("auto", "string"),
    ),
    "--runner": Foreign(
        True, becomes=("--task",), convert=_task, no_effect="the model decides",
        refused=_NO_SCORES, neutral=("auto",),
    ),
    "--convert": Foreign(
        True, becomes=("--task",), convert=_task, no_effect="--task decides", refused=_NO_SCORES,
        neutral=("auto", "none"),
    ),
    "--logprobs-mode": Foreign(
        True, no_effect="log-probabilities are the model's own",
        refused="log-probabilities are the model's own", neutral=("raw_logprobs",),
    ),
    "--scheduling-policy": Foreign(
        True, no_effect="requests run in the order of their arrival",
        refused="requests run in the order of their arrival", neutral=("fcfs",),
    ),
    "--structured-outputs-config": Foreign(
        True, no_effect="llguidance compiles every schema, regex and grammar"
    ),
    "--guided-decoding-backend": Foreign(
        True, no_effect="llguidance compiles every schema, regex and grammar"
    ),
    "--response-role": Foreign(
        True, no_effect="answers are the assistant's", refused="answers are the assistant's",
        neutral=("assistant",),
    ),
    "--data-parallel-size": Foreign(
        True, no_effect="one engine serves", becomes=("--ray", "--num-replicas"), neutral=("1",)
    ),
    "--pipeline-parallel-size": Foreign(
        True, no_effect="one engine serves", refused="a model is not divided by layers", neutral=("1",),
        way_out=_TENSOR_PARALLEL,
    ),
    "--kv-transfer-config": Foreign(True, becomes=("--kv-offload",), convert=_offload),
    "--hf-config-path": Foreign(
        True, refused="the configuration is the checkpoint's own",
        way_out=WayOut("put config.json into the model's directory"),
    ),
    "--override-generation-config": Foreign(
        True, refused="sampling defaults are the checkpoint's own", neutral=("{}",),
        way_out=WayOut("set them in requests, or in the model's generation_config.json"),
    ),
    "--tokenizer": Foreign(
        True, refused="the tokenizer is the checkpoint's own",
        way_out=WayOut("put the tokenizer's files into the model's directory"),
    ),
    "--tokenizer-revision": Foreign(
        True, refused="the tokenizer is the checkpoint's own",
        way_out=WayOut("put the tokenizer's files into the model's directory"),
    ),
    "--hf-token": Foreign(True, refused="a variable holds the key", way_out=WayOut("set HF_TOKEN")),
    "--download-dir": Foreign(True, refused="a variable names it", way_out=WayOut("set HF_HUB_CACHE")),
    "--device-ids": Foreign(
        True, refused="a variable names them", way_out=WayOut("set CUDA_VISIBLE_DEVICES")
    ),
    "--cpu-offload-gb": Foreign(
        True, no_effect="weights are not offloaded", refused="weights are not offloaded", neutral=("0",),
        way_out=WayOut("round the weights while loading: --quantization int4"),
    ),
}  # fmt: skip

SHORT: Mapping[str, str] = {
    "-ac": "--attention-config", "-cc": "--compilation-config", "-O": "--optimization-level",
    "-dc": "--diffusion-config", "-dcp": "--decode-context-parallel-size", "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address", "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb", "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local", "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank", "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank", "-ep": "--enable-expert-parallel", "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization",
    "-r": "--node-rank", "-sc": "--speculative-config", "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
    "--tensor-parallel": "--tensor-parallel-size",
}  # fmt: skip
"""vLLM's short flags and aliases -> their full names; a dot separates a JSON flag from a key."""

_STORED = dict.fromkeys(
    ("ascend", "auto-round", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp_quant", "gguf",
     "gptq", "gptq_marlin", "humming", "inc", "modelopt", "modelopt_fp4", "modelopt_mixed", "moe_wna16",
     "mxfp4", "quark", "torchao"),
    "",
)  # fmt: skip
_STREAMED = dict.fromkeys(
    ("safetensors", "hf", "mistral", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"
)
_KERNELS = dict.fromkeys(
    ("flash_attn", "flash_attn_diffkv", "flashinfer_mla", "flashinfer_mla_sparse", "flashmla",
     "flashmla_sparse", "flex_attention", "cutlass_mla", "triton_mla", "tree_attn", "xformers",
     "tokenspeed_mla", "hpc_attn", "b12x", "rocm_attn", "rocm_aiter_fa", "rocm_aiter_mla",
     "rocm_aiter_mla_sparse", "rocm_aiter_unified_attn", "torch_sdpa", "triton_flashinfer"),
    "auto",
)  # fmt: skip

VALUES: Mapping[str, Mapping[str, str]] = {
    "--load-format": _STREAMED,
    "--generation-config": {"vllm": "none"},
    "--dtype": {"half": "float16", "float": "float32"},
    "--quantization": {
        **_STORED,
        "fp8_per_tensor": "fp8",
        "fp8_per_channel": "fp8_dynamic",
        "int8_per_channel_weight_only": "int8",
    },
    "--attention-backend": {**_KERNELS, "flashinfer": "flashinfer", "triton_attn": "triton"},
}
"""For flags that both programs have: the other program's values, in lower case, -> Kvant's values. An empty
text leaves the flag out, because the checkpoint declares how its weights are stored.
"""
