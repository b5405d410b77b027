#!/usr/bin/env bash
# Installs a wheel as a user without a compiler does, and tries it: an op and `fastenc info` with torch alone, then the tests
# of the ops and the demo, with this checkout's tests and demo over the installed package.
#   release/try.sh PYTHON [WHEEL]   WHEEL: default, the one in dist/ for this Python
# QUICK=1 leaves out the demo. OPS names other tests than those of the ops.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$1
version=$("$PYTHON" -c 'import sys; print("%d%d" % sys.version_info[:2])')
WHEEL=$(realpath "${2:-$(ls dist/fastenc-*-cp"$version"-*_"$(uname -m)".whl)}")
TREE=$PWD
WORK=$PWD/build/release/try-$version
rm -rf "$WORK" && mkdir -p "$WORK/bin"
"$PYTHON" -m venv "$WORK/venv"
BIN=$WORK/venv/bin
# What a machine without a compiler has on its PATH.
for tool in bash sh env uname cat ls rm mkdir dirname ldconfig git; do
  path=$(command -v "$tool" || true)
  [[ -z $path ]] || ln -s "$path" "$WORK/bin/$tool"
done
alone() { env -u LD_LIBRARY_PATH -u PYTHONPATH PATH="$BIN:$WORK/bin" CC=/nonexistent CXX=/nonexistent "$@"; }

echo "== torch alone"
alone "$BIN/pip" install -q --disable-pip-version-check "${TORCH:-torch>=2.11}"
alone "$BIN/pip" install -q --disable-pip-version-check --no-deps --only-binary :all: "$WHEEL"
cd "$WORK"
alone "$BIN/python" -W ignore - <<'E2'
import sys

import torch

import fastenc
from fastenc.ops.library import HAS_CPP

assert HAS_CPP and fastenc.__file__.startswith(sys.prefix), fastenc.__file__
x, weight = torch.randn(40, 384), torch.randn(384)
y = fastenc.ops.layer_norm(x, weight, impl="cpp")
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (384,), weight))
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"transformers", "tokenizers", "safetensors", "triton"}, loaded
E2
alone "$BIN/fastenc" info

echo "== the tests of the ops"
alone "$BIN/pip" install -q --disable-pip-version-check "$WHEEL[demo]" pytest pytest-benchmark scipy onnx
cd "$TREE"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} alone "$BIN/python" -m pytest -q -p no:cacheprovider ${OPS:-tests/ops}

[[ -n ${QUICK:-} ]] && exit
echo "== the demo"
mkdir -p "$WORK/parts" && ln -s "$TREE/python/fastenc/demo" "$WORK/parts/demo"
cd "$WORK"
alone "$BIN/python" - "$WORK/parts" "$WORK/report" <<'E2'
import runpy
import sys

import fastenc

fastenc.__path__.append(sys.argv.pop(1))  # a wheel has no demo
runpy.run_module("fastenc.demo", run_name="__main__", alter_sys=True)
E2
