#!/usr/bin/env bash
# Installs the AArch64 wheel for Python 3.11 beside torch's wheel for that processor, and tries it under qemu:
# `fastenc info`, then the error of every op against float64, forward and backward, on NEON and on NEON with bfloat16.
#   release/try_aarch64.sh [WHEEL]   WHEEL: default, the one in dist/
# It needs Debian 12 (apt, g++-aarch64-linux-gnu, qemu-user-static) and pip. An emulated `import torch` takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
WHEEL=$(realpath "${1:-$(ls dist/fastenc-*-cp311-*_aarch64.whl)}")
WORK=$PWD/build/release/aarch64/try
ROOT=$WORK/root SITE=$WORK/site
mkdir -p "$WORK"

echo "== Debian's Python for AArch64"
if [[ ! -d $ROOT ]]; then
  mkdir -p "$WORK"/apt/state/lists/partial "$WORK"/apt/cache/archives/partial "$WORK/debs"
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$WORK/apt/state" -o Dir::Cache="$WORK/apt/cache" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd "$WORK/debs" && "${apt[@]}" download libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 \
    liblzma5 libsqlite3-0 libuuid1 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
  for package in "$WORK"/debs/*.deb; do dpkg-deb -x "$package" "$ROOT.part"; done
  # A Neoverse N1 with bfloat16: under qemu, torch's own code for newer processors (SVE) crashes.
  identification=$ROOT.part/sys/devices/system/cpu/cpu0/regs/identification
  mkdir -p "$identification" "$ROOT.part/proc"
  echo 0x00000000413fd0c1 >"$identification/midr_el1"
  cat >"$ROOT.part/proc/cpuinfo" <<'E2'
processor	: 0
BogoMIPS	: 100.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp i8mm bf16
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x1
CPU part	: 0xd0c
CPU revision	: 1
E2
  mv "$ROOT.part" "$ROOT"
fi

echo "== torch and the wheel"
python=${TORCH_PYTHON:-$PWD/.venv/bin/python}
install() {
  "$python" -m pip install -q --disable-pip-version-check --no-compile --target "$SITE" --platform manylinux_2_28_aarch64 \
    --platform manylinux2014_aarch64 --python-version 3.11 --only-binary :all: --no-deps "$@"
}
if [[ ! -d $WORK/cuda ]]; then
  install "${TORCH:-torch==2.13.0}" numpy typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock setuptools \
    rich pygments markdown-it-py mdurl
  "$python" release/cuda_stubs.py "$SITE/torch/lib" "$ROOT"/lib/aarch64-linux-gnu "$ROOT"/usr/lib/aarch64-linux-gnu "$WORK/cuda.part"
  mv "$WORK/cuda.part" "$WORK/cuda"
fi
rm -rf "$SITE"/fastenc*
install "$WHEEL"
emulated() {
  PYTHONPATH=$SITE OMP_NUM_THREADS=1 "$(command -v qemu-aarch64-static || command -v qemu-aarch64)" -cpu max,sve=off,sme=off -L "$ROOT" \
    -E LD_PRELOAD="$WORK/cuda/libstub.so" -E LD_LIBRARY_PATH="$WORK/cuda:$SITE/torch/lib" "$ROOT/usr/bin/python3.11" -W ignore "$@"
}

cd "$WORK"
echo "== fastenc info, and the error of every op"
emulated - <<'E2'
import sys

import torch

from fastenc import cli
from fastenc.ops.cases import CASES, Size
from fastenc.ops.library import _C
from fastenc.testing import numerics_report

cli.main(["info"])
# Lengths and widths that are no multiples of the tiles.
size = Size((3, 34, 17), width=84, inner=100, heads=3, head_dim=28, vocabulary=83)
failed = 0
for name in _C.build_info()["usable_instruction_sets"].split():
    assert _C.set_instruction_set(name)
    for case in CASES:
        for row in numerics_report("cpu", dtypes=(torch.float32, torch.bfloat16), cases=[case], size=size):
            failed += not row.holds
            dtype = str(row.dtype).removeprefix("torch.")
            print(
                f"{name:9} {row.op} {row.detail}: {dtype}, {row.quantity}, {row.implementation}: "
                f"error {row.error:.1e} of {row.allowed:.1e}{'' if row.holds else ' FAILED'}",
                flush=True,
            )
print(f"{failed} failed")
sys.exit(failed > 0)
E2
