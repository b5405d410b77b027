#!/usr/bin/env bash
# Cross-compiles the kernels for AArch64 and runs them under qemu, for each of NEON and NEON with bfloat16. It needs
# Debian's g++-aarch64-linux-gnu and qemu-user-static (or qemu-user), and no torch for AArch64.
set -euo pipefail
cd "$(dirname "$0")/.."
WORK=$PWD/build/release/aarch64/kernels
mkdir -p "$WORK"
flags=(-O3 -std=c++20 -Icsrc -fno-math-errno -fno-trapping-math -ffp-contract=fast)
for source in csrc/isa.cpp csrc/cpu/isa_neon.cpp csrc/cpu/isa_neon_bf16.cpp release/kernels.cpp; do
  aarch64-linux-gnu-g++ "${flags[@]}" -c "$source" -o "$WORK/$(basename "$source").o"
done
aarch64-linux-gnu-g++ -static "$WORK"/*.o -o "$WORK/kernels"
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64)
"$qemu" -cpu max "$WORK/kernels"
