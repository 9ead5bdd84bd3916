#!/usr/bin/env bash
# The tests that touch PyTorch's interfaces, on the lowest release that pyproject.toml allows, in an
# environment of its own. Not in CI: PyPI has only that release's CUDA wheels, 2.5 GB to download.
#
#   tests/lowest_torch.sh [folder of the environment]
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-/tmp/dash-lowest-torch}"
release="$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)"
[ -x "$folder/bin/python" ] || python3 -m venv "$folder"
"$folder/bin/pip" install --quiet "torch==$release" numpy pytest hypothesis pybind11 cmake ninja \
  typer rich
DASH_KERNELS=OFF "$folder/bin/python" cmake/build.py
"$folder/bin/python" -m pytest -q tests/test_{api,attention,derivatives,forwards}.py \
  tests/test_{outside_cases,limits,plan,varlen_api}.py
