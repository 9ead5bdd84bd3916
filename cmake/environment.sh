#!/bin/sh
# environment.sh PYTHON VENV: make VENV with all that building, testing and showing dash needs.
# Run by the Makefile, from the repository root; run again, it only adds what is missing. It does
# not compile dash: cmake/build.py does.
#
#   TORCH   what pip is asked for where torch is missing (default: see below)
#   APT=no  never call apt-get, only say what to install
set -eu
python=$1
venv=$2

say() { printf 'dash: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no $python found; name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$python is $("$python" -V 2>&1); Python 3.10 or newer is needed (make PYTHON=…)"

# ---- What only the system can provide: Python's headers, venv, a C++ compiler -------------------

missing=
"$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  missing="$missing python3-dev"
"$python" -c 'import ensurepip, venv' 2>/dev/null || "$python" -c 'import virtualenv' 2>/dev/null ||
  missing="$missing python3-venv"
command -v "${CXX:-c++}" >/dev/null || missing="$missing g++"
if [ -n "$missing" ]; then
  if [ "${APT:-yes}" = yes ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing with apt-get:$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
  else
    fail "missing:$missing. On Debian or Ubuntu: sudo apt-get install$missing"
  fi
fi

# ---- The environment; a torch that the user's Python has is the user's choice and is kept --------

if [ ! -x "$venv/bin/python" ]; then
  site=
  if "$python" -c 'import torch' 2>/dev/null; then
    site=--system-site-packages
    say "$venv uses the torch that $python has"
  fi
  # shellcheck disable=SC2086
  if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    "$python" -m venv $site "$venv"
  else
    "$python" -m virtualenv -q $site "$venv"
  fi
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
bar=-qq  # torch is big: where somebody watches, they see it come
[ -t 1 ] && bar=

# With a GPU pip's newest torch is wanted, else the release that this project's CI tests.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if [ -n "${TORCH:-}" ]; then
    # shellcheck disable=SC2086
    pip install $bar $TORCH
  elif nvidia-smi -L >/dev/null 2>&1; then
    say "installing torch"
    pip install $bar torch
  else
    say "installing torch 2.13.0"
    pip install $bar torch==2.13.0 || pip install $bar torch
  fi
fi

say "installing build and test tools"
# shellcheck disable=SC2046
pip install -qq --no-deps $("$venv/bin/python" cmake/requirements.py tools formatters)
DASH_BUILD=no pip install -qq --no-build-isolation --no-cache-dir -e '.[cli,plot,dev]'
# The stacks that dash adapts to: without them their tests are skipped, which CI may not do.
DASH_BUILD=no pip install -qq --no-build-isolation --no-cache-dir -e '.[integration]' || {
  [ -z "${CI:-}" ] || fail "the extra 'integration' cannot be installed"
  say "transformers, TRL and kernels are not to be had here: their tests are skipped" >&2
}
kernels=$("$venv/bin/python" cmake/requirements.py kernels)
if [ -n "$kernels" ] && [ "${DASH_KERNELS:-AUTO}" != OFF ]; then
  say "installing for the kernels:" $kernels
  # shellcheck disable=SC2086
  pip install -qq --no-deps $kernels || say "not to be had here: building the host part alone" >&2
fi
