#!/usr/bin/env bash
# Checks and measures an NVIDIA GPU on a machine that is lent for minutes.
#
#   benchmarks/gpu_parts.sh [--dry-run] 1|2|3|STAGE ...
#
#   1  benchmarks.gpu_quick: ops checked and timed, training steps, peers, batch invariance, a pretraining run
#   2  the GPU tests; whole models, families and T5 beside transformers; Nsight Compute on each op's kernels
#   3  the sweep of launch parameters for half of the time, then check, times and steps again with what it found
#
# Each part builds the extension first, or goes on without it if the build fails. Each is useful without the others, and
# ends after VISIT_SECONDS (570). STAGE: gpu_quick's sections joined by +, such as time+step, which share a process; or
# tests, families, seq2seq, profile, host_costs, memcheck, ncu, sweep, archive, training:MODEL, inference:MODEL, bench:OP.
#
# Files that a later call needs stay in build/visit/. After every stage, the files to take home are in $OUT (default:
# build/visit/out): at most 8 files of at most 16 MiB. The machine needs no network. PYTHON names another Python than
# that of .venv or the system.
#
# --dry-run runs stages without a GPU, in build/dry-run/. It builds the extension, and compiles every kernel and starts it
# on a driver that starts nothing (benchmarks/_dry_run.py), at small sizes and without timing. A part takes 10 to 30
# minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
DRY=
[[ ${1:-} == --dry-run ]] && DRY=1 && shift
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2; }
case ${1:-} in
  "") usage ;;
  1) STAGES=(check time+step+peers+invariant+graphs+rules pretrain archive) ;;
  2) STAGES=(tests training:bert-base inference:bert-base training:minilm inference:minilm families seq2seq ncu) ;;
  3) STAGES=(sweep check time+step archive) ;;
  *) STAGES=("$@") ;;
esac
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
if [[ -n $DRY ]]; then # compiling takes 20 times as long on two cores
  VISIT=${VISIT_FOLDER:-$PWD/build/dry-run} RUN="$PYTHON -m benchmarks._dry_run" SLOWER=20
else
  VISIT=${VISIT_FOLDER:-$PWD/build/visit} RUN="$PYTHON -m" SLOWER=1
fi
OUT=${OUT:-$VISIT/out}
export FASTENC_VISIT_FOLDER=$VISIT FASTENC_RESULTS=$VISIT/results FASTENC_BENCH_GO_ON=1 TRITON_CACHE_DIR=$VISIT/triton
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
START=$SECONDS END=$((SECONDS + ${VISIT_SECONDS:-570} * SLOWER)) FAILED=0
mkdir -p "$VISIT/tuned" "$OUT" kernels/tuned
[[ -n $DRY ]] || cp -n "$VISIT"/tuned/sm_*.json kernels/tuned/ 2>/dev/null # the tree may have been copied anew
# Triton's cache names its files by their whole paths. One that was made in another folder is told its new place.
[[ -d $VISIT/triton ]] && find "$VISIT/triton" -name '__grp__*' -exec sed -i -E "s#\"/[^\"]*/([^/\"]+/[^/\"]+)\"#\"$VISIT/triton/\1\"#g" {} +
LOG=$VISIT/log.txt
: >"$LOG"

left() { echo $((END - SECONDS)); }
bring() { # copies the files to take home that exist
  cp "$LOG" "$VISIT"/quick/*.json "$VISIT"/ncu.csv "$OUT/" 2>/dev/null
  [[ -d $VISIT/results ]] && tar cJf "$OUT/results.tar.xz" -C "$VISIT" results
  [[ -n $DRY ]] || cp kernels/tuned/sm_*.json "$OUT/" 2>/dev/null
  [[ -n $DRY ]] || cp kernels/tuned/sm_*.json "$VISIT/tuned/" 2>/dev/null
}
stage() { # name, most seconds, command line
  local limit=$((SLOWER * $2)) start=$SECONDS code=0
  (($(left) < limit)) && limit=$(left)
  if ((limit < 10)); then
    echo "$1: not begun, the time is up"
    FAILED=1
    return 1
  fi
  echo "== $1" >>"$LOG"
  FASTENC_BENCH_END=$(($(date +%s) + limit)) timeout --kill-after=10 "$limit" bash -c "$3" >>"$LOG" 2>&1 || code=$?
  bring
  echo "$1: $((SECONDS - start)) s, code $code: $(tail -n 1 "$LOG" | cut -c 1-90)"
  ((code == 0 || code == 75)) && return
  FAILED=1
  return 1
}

ARCH=$($PYTHON -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2>/dev/null) || ARCH=9.0
EXTENSION="python/fastenc/libfastenc.so python/fastenc/_C$($PYTHON -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
HAS_CUDA="$PYTHON -c 'from fastenc.ops.library import _C; raise SystemExit(not (_C and _C.build_info()[\"cuda\"]))'"
SOURCE=$({ LC_ALL=C; cat setup.py csrc/*.* csrc/*/*.*; $PYTHON -c 'import sysconfig, torch; print(sysconfig.get_config_var("EXT_SUFFIX"), torch.__version__)'; echo "$ARCH"; } | sha256sum | cut -c 1-16)
build() {
  # First its Python alone, which takes two seconds: the stages work without the extension too.
  stage install 60 "FASTENC_BUILD=0 $PYTHON -m pip install -q --no-index --no-build-isolation --no-deps -e ."
  if [[ -f $VISIT/extension-$SOURCE/libfastenc.so ]]; then
    cp "$VISIT/extension-$SOURCE"/* python/fastenc/
    stage extension 30 "$HAS_CUDA" && return
  fi
  stage extension 200 "rm -f $EXTENSION; TORCH_CUDA_ARCH_LIST=$ARCH FASTENC_CUDA=1 $PYTHON setup.py -q build_ext --inplace && $HAS_CUDA && mkdir -p $VISIT/extension-$SOURCE && cp $EXTENSION $VISIT/extension-$SOURCE"
}

run_stage() { # STAGE
  local name=${1%%:*} of=${1#*:}
  case $name in
    tests)
      # Eight processes: float64 references take up to 10 GiB each. Warnings of other libraries are no failures here.
      local how="-n 8" which="tests/triton tests/cuda tests/ops/test_cudnn_attention.py tests/models/test_gpu_models.py"
      [[ -n $DRY ]] && how=--collect-only
      stage "$1" 300 "$PYTHON -m pytest -q -p no:cacheprovider -W default $how $which -k 'not budget and not binaries and not gpu_quick'"
      ;;
    training | inference) stage "$1" 75 "$RUN benchmarks.bench_models $of $name --no-compile" ;;
    families) stage "$1" 90 "$RUN benchmarks.bench_families" ;;
    seq2seq) stage "$1" 60 "$RUN benchmarks.bench_seq2seq_step" ;;
    bench) stage "$1" "$(left)" "$RUN benchmarks.bench_$of" ;;
    profile) # of small sizes where only this machine's times would be seen
      local sizes="bert-base --precision bf16 --batch-size 128 --length 128"
      [[ -n $DRY ]] && sizes="minilm --batch-size 2 --length 16"
      stage "$1" 60 "$PYTHON -m fastenc profile $sizes --train -o $VISIT/results/profile"
      ;;
    host_costs)
      local how="-m benchmarks.bench_host_costs"
      [[ -n $DRY ]] && how="-m pytest -q -p no:cacheprovider --collect-only benchmarks/test_host_costs.py"
      stage "$1" 60 "$PYTHON $how"
      ;;
    memcheck)
      stage "$1" 90 "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool memcheck $PYTHON -m tests.helpers.sanitize 'attention*' linear_gelu adamw"
      ;;
    ncu)
      local counters="ncu --target-processes all --clock-control none --profile-from-start off --kernel-name 'regex:_kernel|cross_entropy' --launch-count 40 --kill yes --set basic --section WarpStateStats --section InstructionStats --section MemoryWorkloadAnalysis --csv --page details --log-file $VISIT/ncu.csv"
      [[ -n $DRY ]] && counters=
      stage "$1" 60 "$counters $RUN benchmarks.gpu_quick.profiled"
      ;;
    sweep)
      export FASTENC_SWEEP_SECONDS=$(($(left) / 2))
      stage "$1" $((FASTENC_SWEEP_SECONDS + 20)) "$RUN benchmarks.gpu_quick sweep --output $VISIT/quick"
      ;;
    archive) # Of a compiled kernel Triton needs the machine code, not what came before it, which is more than 16 MiB.
      stage "$1" 40 "tar cf - -C $VISIT --exclude=*.{source,ttir,ttgir,llir,ptx} triton extension-$SOURCE | xz -T0 -3 >$OUT/cache.tar.xz"
      ;;
    *)
      # While the first kernels are checked, several processes compile the others if the cache lacks them.
      [[ $1 == check ]] && { timeout "$(left)" $RUN benchmarks.gpu_quick prewarm --output "$VISIT/prewarm" >"$VISIT/prewarm.txt" 2>&1 & }
      stage "$1" "$(left)" "$RUN benchmarks.gpu_quick ${1//+/ } --output $VISIT/quick"
      wait
      ;;
  esac
}

build
for each in "${STAGES[@]}"; do run_stage "$each"; done
bring
tail -c 7000 "$LOG"
echo "in $OUT after $((SECONDS - START)) s:"
(cd "$OUT" && du -b -- * | sort -n)
if (($(find "$OUT" -type f | wc -l) > 8)) || [[ -n $(find "$OUT" -type f -size +16M) ]]; then
  echo "more than 8 files, or one of more than 16 MiB: not all of it will come back"
  FAILED=1
fi
exit $FAILED
