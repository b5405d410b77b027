#!/usr/bin/env bash
# Installs the wheel for AArch64 beside torch's and runs it under qemu: `fastenc info`, then every op's error against
# float64, on a processor without bfloat16 and on one with it.
#   release/try_aarch64.sh PYTHON [TEST...]   PYTHON: of the version that Debian has; TEST: these tests too
# It needs Debian 12, its qemu-user-static and its packages for AArch64 (dpkg --add-architecture arm64 && apt-get
# update). torch's wheel for AArch64 is one for CUDA: with what it needs, pip fetches 2 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$1
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
WHEEL=$(realpath dist/fastenc-*-cp"${version/./}"-*_aarch64.whl)
WORK=$PWD/build/release/try-aarch64
mkdir -p "$WORK/packages"

echo "== Debian's Python for AArch64"
packages=(libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1)
packages+=("libpython$version-minimal" "libpython$version-stdlib" "python$version-minimal")
(cd "$WORK/packages" && apt-get download -qq "${packages[@]/%/:arm64}")
for package in "$WORK"/packages/*.deb; do dpkg-deb -x "$package" "$WORK/root"; done
# torch reads the processor's name there, and ends with a segmentation fault if it finds that of an x86-64.
mkdir -p "$WORK/root/proc"
printf 'processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0b\nCPU revision\t: 1\n\n' >"$WORK/root/proc/cpuinfo"

echo "== torch and the wheel"
platforms=()
for minor in {40..17}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
install() {
  "$PYTHON" -m pip install -q --disable-pip-version-check --only-binary :all: "${platforms[@]}" --target "$WORK/site" "$@"
}
[[ -d $WORK/site/torch ]] || install "${TORCH:-torch>=2.11}" numpy scipy pytest pytest-benchmark
install --no-deps --upgrade "$WHEEL"

emulated() { # processor, then a command of Python
  PYTHONPATH=$WORK/site OMP_NUM_THREADS=1 qemu-aarch64-static -cpu "$1" -L "$WORK/root" \
    "$WORK/root/usr/bin/python$version" -W ignore "${@:2}"
}
for processor in cortex-a76 max,pauth-impdef=on,sve=off; do
  echo "== on $processor"
  emulated "$processor" -m fastenc info
  emulated "$processor" - <<'REPORT'
import torch

from fastenc.ops.dispatch import DECLARED
from fastenc.testing import Size, numerics_report

torch.set_num_threads(1)
size = Size((5, 33, 2), width=96, inner=160, heads=2, head_dim=32, vocabulary=200)
dtypes = (torch.float32, torch.bfloat16)
rows = numerics_report("cpu", dtypes=dtypes, size=size)
for row in rows:
    if not row.holds:
        print(f"{row.op} {row.detail} {row.dtype} {row.quantity}: {row.error:.1e} of {row.allowed:.1e}")
declared = {op for op, kernels in DECLARED.items() if "cpp" in kernels.implementations}
ran = {row.op for row in rows if row.implementation == "cpp"}
print(f"{len(rows)} errors of {len(ran)} ops with a C++ kernel, {sum(not row.holds for row in rows)} above the budget")
print("not measured:", ", ".join(sorted(declared - ran)))
raise SystemExit(not all(row.holds for row in rows))
REPORT
  (($# < 2)) || emulated "$processor" -m pytest -q -p no:cacheprovider "${@:2}"
done
