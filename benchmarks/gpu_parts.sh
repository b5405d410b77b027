#!/usr/bin/env bash
# A visit to a GPU machine in three parts of at most eight minutes, each useful without the next:
#
#   benchmarks/gpu_parts.sh [--dry-run] 1|2|3
#
#   1  builds the extension (goes on without it where that fails), gpu_quick, Nsight Compute on its forward passes
#   2  the GPU tests with as many processes as there are cores, gpu_quick's check and times again
#   3  whole models on real lengths, a profile, the host's costs, 90 seconds of memcheck
#
# Everything lands in $OUT (gpu-parts/ without it) as it is made: logs, gpu_quick.json, results, the compile cache and
# the extension, which the next part takes from there. --dry-run prints the commands. What belongs to a machine without
# a GPU (binaries ahead of time, the interpreter) is not here; benchmarks/gpu_visit.sh does the long visit.
set -uo pipefail
cd "$(dirname "$0")/.."
DRY=
[[ ${1:-} == --dry-run ]] && DRY=1 && shift
PART=${1:-}
[[ $PART == [123] && $# == 1 ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }
OUT=${OUT:-$PWD/gpu-parts}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export TRITON_CACHE_DIR=$OUT/triton-cache FASTENC_RESULTS=$OUT/results PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PIP_BREAK_SYSTEM_PACKAGES=1
END=$((SECONDS + 480)) FAILED=0

stage() { # name, most seconds, command line
  local limit=$2 start=$SECONDS code
  ((END - SECONDS < limit)) && limit=$((END - SECONDS))
  if [[ -n $DRY ]]; then echo "$1: at most $2 s: $3"; return; fi
  if ((limit < 5)); then echo "$1: not begun, the eight minutes are over"; FAILED=1; return; fi
  timeout --kill-after=10 "$limit" bash -c "$3" >"$OUT/$1.log" 2>&1
  code=$?
  ((code == 0)) || FAILED=1
  echo "$1: $((SECONDS - start)) s, code $code: $(tail -n 1 "$OUT/$1.log" | cut -c 1-100)"
}
[[ -n $DRY ]] || mkdir -p "$OUT"
QUICK="$PYTHON -m benchmarks.gpu_quick --output '$OUT'"
INSTALL="$PYTHON -m pip install --no-index --no-build-isolation --no-deps -e ."
# A compile of the last part, if there is one for this Python and this source.
BUILD="cp -n '$OUT'/_C*.so python/fastenc/ 2>/dev/null; $PYTHON -c 'import fastenc._C' 2>/dev/null || FASTENC_CUDA=1 $INSTALL || FASTENC_BUILD=0 $INSTALL; cp python/fastenc/_C*.so '$OUT'; $PYTHON -m fastenc.cli info"
stage "build_$PART" 240 "$BUILD"
case $PART in
  1)
    stage quick 360 "$QUICK"
    stage ncu 90 "ncu --target-processes all --set full --launch-count 14 -o '$OUT/kernels' -f $PYTHON -m benchmarks.gpu_quick check --output '$OUT/ncu'"
    ;;
  2)
    stage tests 300 "$PYTHON -m pytest -q -p no:cacheprovider -n $(nproc) tests/triton tests/cuda tests/models/test_gpu_models.py -k 'not budget and not binaries'"
    stage quick_again 170 "$QUICK check time step graphs"
    ;;
  3)
    for model in minilm bert-base; do
      stage "models_$model" 120 "$PYTHON -m benchmarks.bench_models $model"
    done
    stage profile 60 "$PYTHON -m fastenc.cli profile bert-base --precision bf16 --batch-size 128 --length 128 --train -o '$OUT/profile'"
    stage host_costs 60 "$PYTHON -m benchmarks.bench_host_costs"
    stage memcheck 90 "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool memcheck $PYTHON -m tests.helpers.sanitize 'attention*'"
    ;;
esac
exit $FAILED
