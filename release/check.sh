#!/usr/bin/env bash
# Checks the files in dist/: version, metadata, size, no library of others inside; for Linux also the tag's symbols, symbols
# stripped, no path of the build in errors.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WORK=$PWD/build/release/check
rm -rf "$WORK" && mkdir -p "$WORK"
"$PYTHON" -m venv "$WORK/venv"
"$WORK/venv/bin/pip" install -q --disable-pip-version-check auditwheel twine
fail() {
  echo "$1" >&2
  exit 1
}

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
grep -qx "## $version" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version': name what is in that version"
[[ ${GITHUB_REF_TYPE:-} != tag || $GITHUB_REF_NAME == "v$version" ]] ||
  fail "the tag of version $version is v$version, got $GITHUB_REF_NAME"

"$WORK/venv/bin/twine" check --strict dist/*.whl dist/*.tar.gz
compiled=0
for wheel in dist/*.whl; do
  name=$(basename "$wheel" .whl)
  "$PYTHON" -m zipfile -e "$wheel" "$WORK/$name"
  (($(stat -c %s "$wheel") <= 10 * 1024 * 1024)) || fail "$name: a wheel has at most 10 MiB, got $(stat -c %s "$wheel") bytes"
  libraries=$(cd "$WORK/$name" && find . -name '*.so*' -o -name '*.dylib*' | sort | tr '\n' ' ')
  if [[ $name == *-none-any ]]; then
    [[ -z $libraries ]] || fail "$name: a wheel for every platform holds no compiled code, got $libraries"
    continue
  fi
  compiled=$((compiled + 1))
  ending=so
  [[ $name != *-macosx_* ]] || ending=dylib
  [[ $libraries =~ ^"./fastenc/_C."[^\ ]+" ./fastenc/libfastenc.$ending "$ ]] || fail "$name: expected the library and one module, got $libraries"
  echo "$name: $(stat -c %s "$wheel") bytes, $libraries"
  [[ $ending == so ]] || continue # what follows has been tried with ELF files alone
  for library in $libraries; do
    file=$WORK/$name/$library
    needed=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | tr '\n' ' ')
    for each in $needed; do
      case $each in
        libfastenc.so | libc10.so | libtorch.so | libtorch_cpu.so | libstdc++.so.6 | libm.so.6 | libgcc_s.so.1 | libc.so.6 | libdl.so.2 | librt.so.1 | libpthread.so.0 | ld-linux-*.so.*) ;;
        *) fail "$name: $library needs $each, which neither torch nor the system brings" ;;
      esac
    done
    ! readelf -S "$file" | grep -q '\.symtab\|\.debug' || fail "$name: $library is not stripped"
    paths=$(LC_ALL=C grep -aoE '[^[:alnum:]_.]/[[:alnum:]_./-]+\.(cpp|h)' "$file" | tr -d '\0' | sort -u | head -3 || true)
    [[ -z $paths ]] || fail "$name: the errors of $library name files of the machine that built it: $paths"
  done
  "$WORK/venv/bin/auditwheel" show "$wheel" >"$WORK/$name.txt"
  # auditwheel names the oldest tag that the symbols allow.
  allowed=$(grep -o 'manylinux_2_[0-9]*' <<<"$name" | tail -1)
  oldest=$(tr '\n' ' ' <"$WORK/$name.txt" | sed -n 's/.*constrains the platform tag to *"\(manylinux_2_[0-9]*\)_.*/\1/p')
  [[ -n $oldest && $(printf '%s\n' "$oldest" "$allowed" | sort -V | tail -1) == "$allowed" ]] ||
    fail "$name: its symbols do not fit its tag: $(cat "$WORK/$name.txt")"
done
((compiled)) || fail "dist/ has no wheel with compiled code"
