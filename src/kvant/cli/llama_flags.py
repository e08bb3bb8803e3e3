"""Translates command lines of llama-server to the flags of `kvant serve`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from kvant.cli.foreign_flags import Foreign
from kvant.errors import BadValue, WayOut

_MODEL = "MODEL"
"""Replaces the model's flags: the model is an argument of `kvant serve`."""

_IN_REQUESTS = WayOut("set it in requests, or in the model's generation_config.json")
_BY_TEMPLATE = "the chat template tells how the model writes reasoning and tool calls"
_ONE_DEVICE = (
    "a device holds all layers; --tensor-parallel-size N divides each of them in equal parts"
)
_TEXT_ONLY = "the server takes text only"
_LOG = "the log has warnings and errors only; --log-requests prints a line for each request"
_MEMORY = "weights are read once and stay in memory"
_LAYERS = Foreign(
    True,
    no_effect="a GPU holds all layers where there is one",
    refused="weights are not divided",
    neutral=("99", "999", "-1", "all", "auto"),
    way_out=WayOut("run on the CPU", ("--device", "cpu")),
)

_TABLE: Sequence[tuple[str, Foreign]] = (
    ("-m --model -hf -hfr --hf-repo", Foreign(True, becomes=(_MODEL,))),
    ("-mu --model-url", Foreign(True, refused="models come from the hub or from this machine")),
    (
        "-hff --hf-file",
        Foreign(
            True,
            refused="a repository's files are chosen by the hub's rules",
            way_out=WayOut("download the file, and name it as the model"),
        ),
    ),
    ("-a --alias", Foreign(True, becomes=("--served-model-name",))),
    ("-c --ctx-size", Foreign(True, becomes=("--max-model-len",), neutral=("0",))),
    ("-np --parallel", Foreign(True, becomes=("--max-num-seqs",), neutral=("-1",))),
    ("-b --batch-size", Foreign(True, becomes=("--max-num-batched-tokens",))),
    ("-ub --ubatch-size", Foreign(True, no_effect="Kvant cuts its steps by itself")),
    (
        "-n --predict --n-predict",
        Foreign(
            True,
            no_effect="answers go on to the end of the context",
            neutral=("-1",),
            refused="the server has no limit of its own",
            way_out=_IN_REQUESTS,
        ),
    ),
    (
        "-t --threads -tb --threads-batch",
        Foreign(True, no_effect="the variable OMP_NUM_THREADS sets the threads"),
    ),
    ("--threads-http", Foreign(True, no_effect="one thread answers")),
    ("-ngl --gpu-layers --n-gpu-layers", _LAYERS),
    (
        "-sm --split-mode",
        Foreign(True, no_effect=_ONE_DEVICE, refused=_ONE_DEVICE, neutral=("none",)),
    ),
    ("-ts --tensor-split", Foreign(True, refused=_ONE_DEVICE)),
    (
        "-mg --main-gpu",
        Foreign(
            True,
            no_effect=_ONE_DEVICE,
            refused=_ONE_DEVICE,
            neutral=("0",),
            way_out=WayOut("choose the GPU with the variable CUDA_VISIBLE_DEVICES"),
        ),
    ),
    ("-ot --override-tensor -ncmoe --n-cpu-moe", Foreign(True, refused=_ONE_DEVICE)),
    ("-cmoe --cpu-moe", Foreign(refused=_ONE_DEVICE)),
    (
        "-fa --flash-attn",
        Foreign(True, no_effect="attention never stores all scores", neutral=("on", "off", "auto")),
    ),
    ("--no-mmap --mmap --mlock", Foreign(no_effect=_MEMORY)),
    ("--numa", Foreign(True, no_effect="the system decides where memory lies")),
    ("-cb --cont-batching", Foreign(no_effect="requests always run in one batch")),
    (
        "-nocb --no-cont-batching",
        Foreign(
            refused="requests always run in one batch",
            way_out=WayOut("run one at a time", ("--max-num-seqs", "1")),
        ),
    ),
    (
        "-kvu --kv-unified --swa-full --context-shift --no-context-shift",
        Foreign(no_effect="all sequences share one pool of pages, and contexts are never cut"),
    ),
    ("--cache-prompt --slots --no-slots --metrics", Foreign(no_effect="it is always on")),
    ("--no-cache-prompt", Foreign(becomes=("--no-enable-prefix-caching",))),
    (
        "--cache-reuse -cram --cache-ram",
        Foreign(True, no_effect="the prefix cache has all free pages"),
    ),
    (
        "--slot-save-path",
        Foreign(
            True,
            refused="slots are not saved to files by requests of llama.cpp's form",
            way_out=WayOut(
                "keep conversations by /v1/kv/sessions: --kv-offload host:SIZE,disk:DIR:SIZE"
            ),
        ),
    ),
    ("--props", Foreign(refused="options do not change while the server runs")),
    ("--host", Foreign(True, becomes=("--host",))),
    ("--port", Foreign(True, becomes=("--port",))),
    ("--api-key", Foreign(True, becomes=("--api-key",))),
    ("--api-key-file", Foreign(True, becomes=("--api-key-file",))),
    ("-to --timeout", Foreign(True, becomes=("--request-timeout",))),
    ("-s --seed", Foreign(True, becomes=("--seed",), neutral=("-1",))),
    (
        "--temp --top-k --top-p --min-p --repeat-penalty --presence-penalty --frequency-penalty --samplers",
        Foreign(True, refused="the server has no sampling values of its own", way_out=_IN_REQUESTS),
    ),
    (
        "--grammar --grammar-file -j --json-schema",
        Foreign(True, refused="a form belongs to a request", way_out=_IN_REQUESTS),
    ),
    ("--jinja", Foreign(no_effect="chat templates are always Jinja")),
    ("--no-jinja", Foreign(refused="chat templates are always Jinja")),
    (
        "--chat-template",
        Foreign(
            True,
            refused="templates have no names here",
            way_out=WayOut("name a file: --chat-template-file FILE"),
        ),
    ),
    ("--chat-template-file", Foreign(True, becomes=("--chat-template",))),
    ("--chat-template-kwargs", Foreign(True, becomes=("--default-chat-template-kwargs",))),
    ("--reasoning-format", Foreign(True, no_effect=_BY_TEMPLATE)),
    (
        "--reasoning-budget",
        Foreign(
            True,
            no_effect="thinking has no budget unless a request gives one",
            neutral=("-1",),
            refused="a budget belongs to a request",
            way_out=WayOut('give it in requests: "thinking_token_budget": 1024'),
        ),
    ),
    (
        "-md --model-draft -hfd",
        Foreign(
            True,
            refused="llama.cpp's drafts are not offered",
            way_out=WayOut('draft from the prompt: --speculative-config \'{"method": "ngram"}\''),
        ),
    ),
    (
        "--draft --draft-max --draft-min --draft-n",
        Foreign(True, refused="it belongs to --model-draft"),
    ),
    ("--embedding --embeddings", Foreign(becomes=("--task", "embed"))),
    (
        "--pooling",
        Foreign(
            True,
            no_effect="the last token is the vector",
            refused="the last token is the vector",
            neutral=("last",),
        ),
    ),
    (
        "--rerank --reranking",
        Foreign(refused="no answer is a score", way_out=WayOut("ask for prompt_logprobs")),
    ),
    (
        "--lora --lora-scaled --control-vector",
        Foreign(
            True,
            refused="adapters are not offered",
            way_out=WayOut("merge the adapter into the weights first"),
        ),
    ),
    ("-mm --mmproj", Foreign(True, refused=_TEXT_ONLY)),
    ("--no-mmproj", Foreign(no_effect=_TEXT_ONLY)),
    (
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx",
        Foreign(
            True,
            refused="rotary frequencies are the checkpoint's own",
            way_out=WayOut("change them in a copy of the model's config.json"),
        ),
    ),
    (
        "--ssl-key-file --ssl-cert-file",
        Foreign(True, refused="there is no TLS", way_out=WayOut("put a proxy in front")),
    ),
    (
        "--api-prefix --path",
        Foreign(True, refused="paths begin at /", way_out=WayOut("strip it in the proxy")),
    ),
    ("--no-webui --webui", Foreign(no_effect="the page at / is static and reads public endpoints")),
    (
        "--warmup --no-warmup --check-tensors -e --escape",
        Foreign(no_effect="Kvant does what it needs"),
    ),
    ("-v --verbose --log-disable --log-timestamps --log-prefix", Foreign(no_effect=_LOG)),
    ("--log-file -lv --verbosity --prio --poll --log-colors", Foreign(True, no_effect=_LOG)),
    ("--offline", Foreign(refused="a variable does it", way_out=WayOut("set HF_HUB_OFFLINE=1"))),
)
LLAMA_SERVER: Mapping[str, Foreign] = {flag: one for flags, one in _TABLE for flag in flags.split()}

_SIDES = {"-ctk": "k", "--cache-type-k": "k", "-ctv": "v", "--cache-type-v": "v"}
KV_TYPES: Mapping[str, str] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "q8_0": "int8_per_token_head",
    "q4_0": "int4_per_token_head",
}
"""ggml's cache types -> Kvant's formats with as many bits. Their arithmetic differs."""


def flags_of(one: Foreign) -> str:
    """Returns all names of a flag of llama-server."""
    return next(flags.replace(" ", ", ") for flags, found in _TABLE if found is one)


def translate_llama_server(
    words: Sequence[str], refused: list[BadValue]
) -> Iterator[str | Foreign]:
    """Yields arguments of `kvant serve`, and a `Foreign` for each flag that is ignored.

    Appends the error of each flag that is unknown or cannot be served to `refused`.
    """
    sides: dict[str, str] = {}
    rest = deque(words)
    while rest:
        flag, has_value, value = rest.popleft().partition("=")
        one = LLAMA_SERVER.get(flag)
        try:
            if flag in _SIDES:
                sides[_SIDES[flag]] = _format(flag, value if has_value else _next(rest))
            elif one is None:
                while rest and not rest[0].startswith("-"):  # its values
                    rest.popleft()
                raise BadValue(
                    f"{flag} is not a flag of llama-server that Kvant knows",
                    ways_out=(WayOut("list Kvant's options", ("kvant", "serve", "--help")),),
                )
            else:
                may_lack_value = flag in ("-fa", "--flash-attn")
                is_given = not may_lack_value or (rest and rest[0] in one.neutral)
                if one.takes_value and not has_value and is_given:
                    value = _next(rest)
                yield from _one(flag, value, one)
        except BadValue as fault:
            refused.append(fault)
    if sides:
        k, v = sides.get("k", "auto"), sides.get("v", "auto")
        k, v = (k if k != "auto" else "float16"), (v if v != "auto" else "float16")
        yield from ("--kv-cache-dtype", k if k == v else f"{k}/{v}")


def _next(words: deque[str]) -> str:
    return words.popleft() if words else ""


def _one(flag: str, value: str, one: Foreign) -> Iterator[str | Foreign]:
    if one.becomes == (_MODEL,):
        yield value.split(":")[0] if flag.startswith(("-hf", "--hf")) else value
    elif one.becomes:
        if value not in one.neutral or not one.neutral:
            yield from one.becomes
            if one.takes_value:
                yield value
    elif one.refused and value not in one.neutral:
        raise BadValue(
            f"{flag} {value}".strip() + " is not served",
            why=one.refused,
            ways_out=(one.way_out or WayOut("leave it out"),),
        )
    else:
        yield one


def _format(flag: str, name: str) -> str:
    if name not in KV_TYPES:
        known = ", ".join(KV_TYPES)
        raise BadValue(
            f"{flag} {name} has no format of its kind here",
            why=f"these have: {known}",
            ways_out=(WayOut("take 4 bits", (flag, "q4_0")), WayOut("take 8 bits", (flag, "q8_0"))),
        )
    return KV_TYPES[name]
