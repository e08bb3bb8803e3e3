"""Effects of formats on answers: README's table, and docs/reliability.md's GSM8K."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables import Cells, held, percent, table


@table("gsm8k", "smollm2-gsm8k.json")
def gsm8k(data: Any) -> Cells:
    lines = [["KV format", "B/token", "mean log-likelihood", "drift a token", "right"]]
    for r in data["rows"]:
        lines.append(
            [r["format"], f"{r['bytes_per_token']:,}", f"{r['mean_logprob']:.4f}", f"{r['drift']:.4f}",
             f"{r['right']} of {data['problems']}"]
        )  # fmt: skip
    return lines


@table("h200-gsm8k", "h200-gsm8k.json", "smollm2-gsm8k.json")
def gsm8k_on_gpu(gpu: Any, cpu: Any) -> Cells:
    on_cpu = {r["format"]: r for r in cpu["rows"]}
    lines = [["KV format", "likelihood, H200", "CPU", "drift, H200", "CPU", "right, H200", "CPU"]]
    for r in gpu["rows"]:
        pair = r, on_cpu[r["format"]]
        lines.append(
            [r["format"], *(f"{one['mean_logprob']:.4f}" for one in pair),
             *(f"{one['drift']:.4f}" for one in pair),
             *(f"{one['right']} of {gpu['problems']}" for one in pair)]
        )  # fmt: skip
    return lines


@table("demo-formats", "demo.json")
def formats(data: Any) -> Cells:
    lines = [["KV format (K/V)", "B/token", "tokens/GiB", "mean KL", "same top token"]]
    for r in data["formats"]:
        fidelity = r["fidelity"]
        lines.append(
            [
                r["format"].replace("/", " / "),
                f"{r['bytes_per_token']:,}",
                f"{r['tokens_per_gib']:,}",
                f"{fidelity['mean_kl']:.5f}",
                percent(fidelity["same_top"], digits=1),
            ]
        )
    return lines


@table("fp8-quality", "fp8-quality.json")
@table("fp8-quality-gpu", "h200-fp8-quality.json")
def fp8_products(data: Any) -> Cells:
    lines = [["KV format", "backend", "mean KL", "its standard error", "same top token",
              "negative log-likelihood"]]  # fmt: skip
    for r in data["rows"]:
        kl, error = ("-" if x is None else f"{x:.5f}" for x in (r["mean_kl"], r["kl_error"]))
        same = "-" if r["same_top"] is None else percent(r["same_top"], digits=1)
        lines.append([r["format"], r["backend"], kl, error, same, f"{r['nll']:.4f}"])
    return lines


@table("kv-methods", "kv-methods.json")
def methods(data: Any) -> Cells:
    lines = [["simulated", "bits", "mean KL", "its standard error", "99 %", "same top token"]]
    for r in data["rows"]:
        figures = (r["kld_mean"], r["kld_mean_error"], r["kld_p99"])
        same = percent(r["same_top"], digits=1)
        lines.append([r["way"], f"{r['bits']:.2f}", *(f"{x:.5f}" for x in figures), same])
    return lines


@table("conversions", "smollm2-conversions.json")
def conversions(data: Any) -> Cells:
    kl = {(row["source"], row["target"]): row["kld_mean"] for row in data["rows"]}
    names = list(dict.fromkeys(source for source, _ in kl))
    lines = [["pages of", *names]]
    lines += [[source, *(f"{kl[source, name]:.5f}" for name in names)] for source in names]
    return lines


@table("wide-rows", "wide-rows.json")
def wide_rows(data: Any) -> Cells:
    lines = [["stored as", "wide rows", "context", "bits", "mean KL", "its standard error", "99 %",
              "same top token"]]  # fmt: skip
    for stored, r in ((run["wide_rows_in"], r) for run in data["runs"] for r in run["rows"]):
        figures = (r["kld_mean"], r["kld_mean_error"], r["kld_p99"])
        rows = "none" if r["rows"] == "0+0" else "first {}, last {}".format(*r["rows"].split("+"))
        rows += "" if stored == "bfloat16" else f", {stored}"
        same = percent(r["same_top"], digits=1)
        lines.append(
            [r["format"], rows, f"{r['context']:,}", f"{r['bits']:.2f}",
             *(f"{x:.5f}" for x in figures), same]
        )  # fmt: skip
    return lines


@table("wide-sides", "wide-sides.json")
def wide_sides(data: Any) -> Cells:
    """Formats with wide rows of both sides, of K and of V, by context."""
    lines = [
        ["stored as", "wide", "context", "bits", "mean KL", "its standard error", "same top token"]
    ]
    rows = [(run["wide_rows_in"], r) for run in data["runs"] for r in run["rows"]]
    order = list(dict.fromkeys((r["context"], r["format"]) for _, r in rows))
    for stored, r in sorted(
        rows, key=lambda one: order.index((one[1]["context"], one[1]["format"]))
    ):
        side = {"k": "K", "v": "V"}.get(stored.partition("=")[0], "both")
        rows_of = "first {}, last {}".format(*r["rows"].split("+"))
        lines.append(
            [r["format"], f"{side}: {rows_of}", f"{r['context']:,}", f"{r['bits']:.2f}",
             f"{r['kld_mean']:.5f}", f"{r['kld_mean_error']:.5f}", percent(r["same_top"], digits=1)]
        )  # fmt: skip
    return lines


_NARROW = {"k3v3": "K3/V3", "s4": "int4_short", "s4n2": "int4_short/normal2", "n2": "normal2"}
_WIDE = {"bf16": "bfloat16", "i8": "int8_per_token_head"}


def _form(key: str) -> str:
    """Returns `int4, wide rows in bfloat16` for `int4+bf16 ..`."""
    name, _, rows_in = key.split(" ")[0].partition("+")
    return _NARROW.get(name, name) + (f", wide rows in {_WIDE[rows_in]}" if rows_in else "")


@table("wide-decode", "h200-rotation.json")
def wide_decode(data: Any) -> Cells:
    """Attention as it is, and after a rotation of queries that lets it start early."""
    lines = [["stored as", "us", "of bfloat16", "started early, us", "of bfloat16"]]
    for key in data["rows"]:
        name, _, way = key.partition(" ")
        if way in ("", "early"):
            ways = (name, "") if name == "bf16" else (f"{name} tree", key)
            runs = (data["rows"].get(one) for one in ways)
            cells = [
                text
                for r in runs
                for text in (
                    ("-", "-") if r is None else (f"{r['us']:.1f}", f"{r['of_bf16']:.3f}x")
                )
            ]
            lines.append([_form(key), *cells])
    return lines


@table("wide-decode-before", "h200-wide-decode.json")
def wide_decode_before(data: Any) -> Cells:
    lines = [["stored as", "sequences", "tokens", "us", "of bfloat16"]]
    rows = data["before"]["rows"]
    shapes = list(dict.fromkeys(key.partition(" ")[2] for key in rows))
    for key, r in sorted(rows.items(), key=lambda item: shapes.index(item[0].partition(" ")[2])):
        _, batch, length, _ = key.split(" ")
        figures = f"{r['us']:.1f}", f"{r['of_bf16']:.2f}x"
        lines.append([_form(key), batch[1:], f"{int(length[1:]):,}", *figures])
    return lines


@table("eval-quick", "smollm2-eval-quick.json")
def evaluated(data: Any) -> Cells:
    contexts = [str(length) for length in data["contexts"]]
    lines = [["KV format", "B/token", *(f"mean KL at {int(c):,}" for c in contexts), "99 %", "same top token",
              "PPL ratio", "K alone", "V alone", "tokens/s"]]  # fmt: skip
    for name, one in data["formats"].items():
        kl = [one["contexts"][c]["kld_mean"] for c in contexts]
        alone = (one["k_alone"], one["v_alone"])
        lines.append(
            [name, f"{one['bytes_per_token']:,}", *(f"{x:.5f}" for x in (*kl, one["kld_p99"])),
             percent(one["same_top"], digits=1), f"{one['ppl_ratio']:.4f}",
             *(f"{x:.5f}" for x in alone), f"{one['decode']['tokens_per_second']:.1f}"]
        )  # fmt: skip
    return lines


@table("eval-gpu", "h200-eval.json")
def evaluated_on_a_gpu(data: Any) -> Cells:
    contexts = [str(length) for length in data["contexts"]]
    kls = (f"mean KL at {int(c):,}" for c in contexts)
    lines = [["KV format", "B/token", *kls, "its standard error", "99 %", "same top token", "PPL ratio",
              "same text", "needles", "tokens/s"]]  # fmt: skip
    for name, one in data["formats"].items():
        kl = [
            *(one["contexts"][c]["kld_mean"] for c in contexts),
            one["kld_mean_error"],
            one["kld_p99"],
        ]
        found = sum(one["needles"][c]["found"] for c in contexts)
        lines.append(
            [name, f"{one['bytes_per_token']:,}", *(f"{x:.5f}" for x in kl),
             percent(one["same_top"], digits=1), f"{one['ppl_ratio']:.4f}",
             percent(one["generation"]["same"], digits=0),
             f"{found} of {sum(one['needles'][c]['of'] for c in contexts)}",
             f"{one['decode']['tokens_per_second']:.0f}"]
        )  # fmt: skip
    return lines


@table("eval-32k", "h200-eval-32k.json")
def evaluated_at_32k(data: Any) -> Cells:
    lines = [["stored with wide rows", "bits", "mean KL at 8,192", "at 32,768", "its standard error", "99 %",
              "same top token", "PPL ratio"]]  # fmt: skip
    for name, one in data["formats"].items():
        kl = (
            one["contexts"]["8192"]["kld_mean"],
            one["kld_mean"],
            one["kld_mean_error"],
            one["kld_p99"],
        )
        lines.append(
            [name, f"{one['bits_per_value']:.2f}", *(f"{x:.5f}" for x in kl),
             percent(one["same_top"], digits=1), f"{one['ppl_ratio']:.4f}"]
        )  # fmt: skip
    return lines


@table("eval-32k-narrow", "h200-eval-32k.json")
def evaluated_at_32k_without_wide_rows(data: Any) -> Cells:
    lines = [["stored without wide rows", "bits", "mean KL at 32,768", "its standard error", "99 %",
              "same top token", "PPL ratio"]]  # fmt: skip
    for name, one in data["without_wide_rows"]["formats"].items():
        kl = (one["kld_mean"], one["kld_mean_error"], one["kld_p99"])
        lines.append(
            [name, f"{one['bits_per_value']:.2f}", *(f"{x:.5f}" for x in kl),
             percent(one["same_top"], digits=1), f"{one['ppl_ratio']:.4f}"]
        )  # fmt: skip
    return lines


@table("eval-steps", "h200-eval-steps.json")
def recorded_steps(data: Any) -> Cells:
    lines = [["decoded positions of each window", "launched one by one, s", "recorded, s",
              "a step launched, ms", "recorded, ms"]]  # fmt: skip
    for one in data["runs"].values():
        steps = [one[f"{way}_ms"][""] for way in ("launched", "recorded")]
        lines.append(
            [str(one["decode"]), f"{one['launched_s']:.1f}", f"{one['recorded_s']:.1f}",
             *(f"{ms:.1f}" for ms in steps)]
        )  # fmt: skip
    return lines


@table("reasoning", "smollm2-reasoning.json")
def reasoning(data: Any) -> Cells:
    lines = [
        ["stored as", "B/token", "pass@1", "minus the baseline", "answers cut off"],
    ]
    for name, one in data["formats"].items():
        change = "-"
        if name != data["baseline"]:
            change = f"{100 * one['against_baseline']:+.1f} ± {100 * one['against_baseline_error']:.1f} %"
        lines.append(
            [name, f"{one['bytes_per_token']:,}",
             f"{100 * one['pass_at_1']:.1f} ± {100 * one['pass_at_1_error']:.1f} %", change,
             percent(one["cut"], digits=0)]
        )  # fmt: skip
    return lines


@table("encoders", "encoders.json")
def encoders(data: Any) -> Cells:
    lines = [["keys in", "us a token, heads of 64", "heads of 128"]]
    for name, sizes in data["us_per_token"].items():
        lines.append([name, *(f"{one:.1f}" for one in sizes.values())])
    return lines


@table("encoders-gpu", "h200-encoders.json")
def encoders_on_a_gpu(data: Any) -> Cells:
    runs = data["runs"]
    sizes = [f"{run['tokens']:,} token" + ("s" if run["tokens"] > 1 else "") for run in runs]
    lines = [["keys in", *(f"{one}, us" for one in sizes)]]
    for name in runs[0]["us_per_token"]:
        us = [run["us_per_token"][name]["128"] * run["tokens"] for run in runs]
        lines.append([name, *(f"{one:.1f}" for one in us)])
    return lines


@table("encoders-feedback", "h200-encoders.json")
def encoders_with_feedback(data: Any) -> Cells:
    lines = [["a key's numbers", "1 token, us", "1 token, L2 flushed", "64 tokens", "2,048 tokens"]]
    for one in data["feedback"]["forms"]:
        us, flushed = one["us"], one["us_with_l2_flushed"]
        cells = [us["128 1"], flushed["128 1"], us["128 64"], us["128 2048"]]
        lines.append([one["form"], *(f"{cell:.1f}" for cell in cells)])
    return lines


@table("head-sizes", "head-sizes.json")
def head_sizes(data: Any) -> Cells:
    lines = [["format", "bits, heads of 64", "error", "bits, heads of 128", "error"]]
    for name, sizes in data["formats"].items():
        cells = [name]
        for one in sizes.values():
            cells += [f"{one['bits']:.3f}", f"{one['error']:.2e}"]
        lines.append(cells)
    return lines


@table("tune", "smollm2-tune.json")
@table("tune-short", "smollm2-tune-short.json")
def tuned(data: Any) -> Cells:
    named = {f"policy, --budget {name}bits": one for name, one in data["policies"].items()}
    return _tuned_rows(named | data["uniform"])


def _tuned_rows(named: dict[str, Any]) -> Cells:
    """Returns rows sorted by bytes. named: entries of `kvant tune --format json`."""
    lines = [["stored as", "B/token", "bits", "mean KL", "its standard error", "same top token"]]
    for name, one in sorted(named.items(), key=lambda item: item[1]["bytes_per_token"]):
        figures = (one["kld_mean"], one["kld_mean_error"])
        same = percent(one["same_top"], digits=1)
        lines.append(
            [name, f"{one['bytes_per_token']:,}", f"{one['bits']:.2f}",
             *(f"{x:.5f}" for x in figures), same]
        )  # fmt: skip
    return lines


@table("tune-max-kl", "smollm2-tune-max-kl.json")
def tuned_for_kl(data: Any) -> Cells:
    uniform = data["uniform"]
    names = ("turboquant_k8/turboquant_v4", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head")
    named = {"policy, --max-kl 0.0091": data["policy"], **{name: uniform[name] for name in names}}
    return _tuned_rows(named)


@table("tune-wide", "smollm2-tune-wide.json")
def tuned_with_wide_rows(data: Any) -> Cells:
    rows = data["wide_rows"]
    wide = f", first {rows['sink']}, last {rows['recent']}"
    named = {f"policy, --budget {bits}bits{wide}": one for bits, one in data["policies"].items()}
    uniform = {name.replace(", wide rows", wide): one for name, one in data["uniform"].items()}
    return _tuned_rows(named | uniform | data["more_rows"]["uniform"])


@table("tune-gradients", "smollm2-tune-gradients-8k.json")
def tuned_with_gradients(data: Any) -> Cells:
    named: dict[str, Any] = {}
    for key, run in data["runs"].items():
        bits, comma, how = key.partition(", ")
        named |= {f"policy, --budget {bits}bits{comma}{how}": run["policy"], **run["uniform"]}
    return _tuned_rows(named)


@table("tune-rows", "smollm2-tune-rows.json")
def tuned_with_rows_per_layer(data: Any) -> Cells:
    named: dict[str, Any] = {}
    for run in data["runs"]:
        what = f"rows in {run['rows_in']}"
        named |= {f"policy, --budget {b}bits, {what}": one for b, one in run["policies"].items()}
        named |= run["uniform"]
    return _tuned_rows(named)


@table("tune-rows-goals", "smollm2-tune-rows.json")
def goals_of_rows_per_layer(data: Any) -> Cells:
    """The last run that has a policy of these bits counts."""
    uniform: dict[str, Any] = {}
    policies: dict[str, Any] = {}
    for run in data["runs"]:
        uniform |= run["uniform"]
        policies |= run["policies"]
    plain = {name: one for name, one in uniform.items() if " wide" not in name}
    lines = [["bits", "KL, of the best uniform format within the policy's bytes",
              "of the best without wide rows", "bytes saved at equal KL", "without wide rows"]]  # fmt: skip
    for bits, policy in policies.items():
        shares = [f"{_share_of_kl(policy, some):.2f}x" for some in (uniform, plain)]
        saved = [percent(_saved(policy, some), digits=0) for some in (uniform, plain)]
        lines.append([bits, *shares, *saved])
    return lines


def _share_of_kl(policy: Any, uniform: dict[str, Any]) -> float:
    size = policy["bytes_per_token"]
    within = [u["kld_mean"] for u in uniform.values() if u["bytes_per_token"] <= size]
    return float(policy["kld_mean"] / min(within))


def _saved(policy: Any, uniform: dict[str, Any]) -> float:
    as_good = [
        u["bytes_per_token"] for u in uniform.values() if u["kld_mean"] <= policy["kld_mean"]
    ]
    return float(1 - policy["bytes_per_token"] / min(as_good))


@table("tune-calibrated", "smollm2-tune-calibrated.json", "smollm2-tune.json")
def tuned_calibrated(data: Any, plain: Any) -> Cells:
    rows = {
        "int4_per_token_head": plain["uniform"]["int4_per_token_head"],
        "int4_feedback": data["uniform"]["int4_feedback/int4_per_token_head"],
        "policy, --budget 4.5bits": data["policy"],
        "fp8_e4m3, scale 1.0": plain["uniform"]["fp8_e4m3"],
        "fp8_e4m3, calibrated": data["uniform"]["fp8_e4m3"],
    }
    lines = [["stored as", "bits", "mean KL", "its standard error", "99 %", "same top token"]]
    for name, one in rows.items():
        figures = (one["kld_mean"], one["kld_mean_error"], one["kld_p99"])
        same = percent(one["same_top"], digits=1)
        lines.append([name, f"{one['bits']:.2f}", *(f"{x:.5f}" for x in figures), same])
    return lines


@table("tune-calibrated-short", "smollm2-tune-calibrated-short.json")
def tuned_calibrated_short(data: Any) -> Cells:
    rows = {name.replace("int4_feedback/int4_per_token_head", "int4_feedback"): one
            for name, one in data["uniform"].items()}  # fmt: skip
    rows["policy, --budget 4.5bits"] = data["policy"]
    lines = [["stored as", "B/token", "bits", "mean KL", "its standard error", "same top token"]]
    for name, one in sorted(rows.items(), key=lambda item: item[1]["bytes_per_token"]):
        figures = (one["kld_mean"], one["kld_mean_error"])
        same = percent(one["same_top"], digits=1)
        lines.append(
            [
                name,
                f"{one['bytes_per_token']:,}",
                f"{one['bits']:.2f}",
                *(f"{x:.5f}" for x in figures),
                same,
            ]
        )
    return lines


@table("llama-cpp-kl", "llama-cpp-kl.json")
def as_llama_cpp(data: Any) -> Cells:
    lines = [["cache type", "figures of", "mean KL", "its standard error", "median", "99 %", "99.9 %",
              "maximum", "same top token", "PPL ratio"]]  # fmt: skip
    who = {"llama_cpp": "llama.cpp", "kvant": "Kvant"}
    for r in data["rows"]:
        for key, name in who.items():
            one = r[key]
            figures = (
                one[f"kld_{part}"]
                for part in ("mean", "mean_error", "median", "p99", "p999", "max")
            )
            lines.append(
                [r["cache_type"], name, *(f"{x:.6f}" for x in figures),
                 percent(one["same_top"], digits=3), f"{one['ppl_ratio']:.6f}"]
            )  # fmt: skip
    return lines


@table("feedback", "smollm2-calibrate.json")
def feedback(data: Any) -> Cells:
    return _calibrated(data["rounding"], "stored as")


@table("calibrate", "smollm2-calibrate.json")
def calibrated(data: Any) -> Cells:
    return _calibrated(data["compared"], "scales")


def _calibrated(found: Any, title: str) -> Cells:
    lines = [[title, "mean KL", "its standard error", "99 %", "same top token"]]
    for name, one in found.items():
        figures = (one["kld_mean"], one["kld_mean_error"], one["kld_p99"])
        same = percent(one["same_top"], digits=1)
        lines.append([name, *(f"{x:.5f}" for x in figures), same])
    return lines


@table(
    "state-formats", "state-gated-delta.json", "state-gated-delta-feedback.json",
    "state-gated-delta-stochastic.json", "state-mamba2.json", "state-mamba2-feedback.json",
    "state-mamba2-stochastic.json",
)  # fmt: skip
def states(*data: Any) -> Cells:
    stretches = list(data[0]["rows"][0]["stretches"])
    shown = [one.replace("-", " to ") for one in stretches]
    lines = [["model", "KV format", "state", "B of states", "mean KL", "its standard error",
              "same top token", "in pieces", *(f"KL, {one}" for one in shown)]]  # fmt: skip
    for one in data:
        for r in one["rows"]:
            figures = (r["kld_mean"], r["kld_mean_error"])
            lines.append(
                [one["model"].removesuffix("ForCausalLM"), r["kv"],
                 ", ".join([r["state"], *filter(None, [r.get("rounding")])]),
                 f"{r['bytes_per_sequence']:,}", *(f"{x:.1e}" for x in figures),
                 percent(r["same_top"], digits=1), f"{r['prompt']['kld_mean']:.1e}",
                 *(f"{r['stretches'][key]:.1e}" for key in stretches)]
            )  # fmt: skip
    return lines


@table(
    "quality-goals", "wide-rows.json", "h200-rotation.json", "smollm2-tune-short.json",
    "smollm2-tune-gradients-8k.json", "smollm2-tune-max-kl.json", "smollm2-calibrate.json",
)  # fmt: skip
def goals(rows: Any, decode: Any, short: Any, wide: Any, equal: Any, calibrated: Any) -> Cells:
    """What was wanted of 2 to 6 bits, and what was measured."""
    return [
        ["goal", "measured with", "figure", "limit"],
        *_goals_of_bits(rows),
        *_goals_of_decoding(decode),
        *_goals_of_policies(short, wide, equal),
        _goal_of_calibration(calibrated["compared"]),
    ]


def _goals_of_bits(data: Any) -> Iterator[list[str]]:
    """Formats with wide rows, beside formats without, at two lengths."""
    stored = {
        (r["format"], r["rows"], r["context"]): r
        for run in data["runs"]
        if run["wide_rows_in"] == "bfloat16"
        for r in run["rows"]
    }
    int4 = "int4_per_token_head"
    for most, name, kept, other, limits in (
        ("4.6", "int4_short_feedback", "16+144", int4, (0.03, 0.10)),
        ("3.6", "int4_short_feedback/normal2", "16+144", int4, (0.25, 0.25)),
        ("2.7", "normal2", "16+128", "turboquant_k3/turboquant_v3", (1.0, 1.0)),
    ):
        what = f"{name}, {stored[name, kept, 8192]['bits']:.2f} bits"
        for context, limit in zip((1024, 8192), limits, strict=True):
            one, beside = (stored[key] for key in ((name, kept, context), (other, "0+0", context)))
            share = one["kld_mean"] / beside["kld_mean"]
            goal = f"{most} bits: KL at {context:,} tokens, of {other}"
            yield [goal, what, f"{share:.2g}x", held(share, limit)]
        if most == "4.6":
            same = one["same_top"]
            yield [f"{most} bits: same top token at {context:,} tokens", what,
                   percent(same, digits=1), held(same, 0.97, least=True, shown="97 %")]  # fmt: skip


def _goals_of_decoding(data: Any) -> Iterator[list[str]]:
    for bits, key, limit in (("4", "int4+bf16", 0.42), ("3", "s4n2+bf16", 0.40)):
        share = data["rows"][f"{key} tree"]["of_bf16"]
        goal = f"{bits} bits: time of decode attention, of bfloat16"
        yield [goal, _form(key), f"{share:.3f}x", held(share, limit)]


def _goals_of_policies(short: Any, wide: Any, equal: Any) -> Iterator[list[str]]:
    """Policies beside the best uniform formats of this page with no more bytes, or no more KL."""
    without, beside = (
        "a policy without wide rows",
        "rows per layer, beside uniform formats with rows",
    )
    policies = {bits: run["policy"] for bits, run in wide["runs"].items()}
    uniform = {name: one for run in wide["runs"].values() for name, one in run["uniform"].items()}
    for what, some, others in (
        (without, short["policies"], short["uniform"]),
        (beside, policies, uniform),
    ):
        for key, policy in some.items():
            bits, comma, how = key.partition(", ")
            share = _share_of_kl(policy, others)
            goal = f"policy of {bits} bits: KL, of the best uniform format"
            yield [goal, f"{what}{comma}{how}", f"{share:.2f}x", held(share, 0.6)]
    saved = 1 - equal["policy"]["bytes_per_token"] / equal["uniform"]["fp8_e4m3"]["bytes_per_token"]
    goal = "bytes saved at the KL of fp8_e4m3"
    yield [goal, without, percent(saved), held(saved, 0.2, least=True, shown="20 %")]


def _goal_of_calibration(compared: Any) -> list[str]:
    best = min(compared, key=lambda name: compared[name]["kld_mean"])
    share = compared[best]["kld_mean"] / compared["uncalibrated"]["kld_mean"]
    return [
        "fp8_e4m3 with calibrated scales: KL, of scale 1.0",
        best,
        f"{share:.2f}x",
        held(share, 1.0),
    ]
