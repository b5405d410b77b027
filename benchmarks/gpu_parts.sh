#!/usr/bin/env bash
# Checks and measures an NVIDIA GPU on a machine that is lent for minutes, in three parts of at most nine and a half
# minutes. Each part is useful without the next.
#
#   benchmarks/gpu_parts.sh [--dry-run] 1|2|3
#
#   1  builds the extension, or goes on without it if the build fails; benchmarks.gpu_quick, section by section; Nsight
#      Compute on each op's kernels; the sweep of launch parameters
#   2  the GPU tests; check, times and steps again, with the launch parameters that part 1 found
#   3  whole models on real lengths, training first; a profile; the host's costs; memcheck; then the ops' benchmarks
#      until the time is up. The next call of this part goes on with them
#
# Files that a later part needs stay in build/visit/. After every stage, the files to take home are in $OUT (default:
# build/visit/out): at most 8 files of at most 16 MiB. The machine needs no network. PYTHON names another Python than
# that of .venv or the system.
#
# --dry-run runs a part without a GPU, in build/dry-run/. It builds the extension, and compiles every kernel and starts it
# on a driver that starts nothing (benchmarks/_dry_run.py), at small sizes and without timing. A part takes 10 to 30
# minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
DRY=
[[ ${1:-} == --dry-run ]] && DRY=1 && shift
PART=${1:-}
[[ $PART == [123] && $# == 1 ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2; }
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
if [[ -n $DRY ]]; then # compiling takes 20 times as long on two cores
  VISIT=${VISIT_FOLDER:-$PWD/build/dry-run} RUN="$PYTHON -m benchmarks._dry_run" SLOWER=20
else
  VISIT=${VISIT_FOLDER:-$PWD/build/visit} RUN="$PYTHON -m" SLOWER=1
fi
OUT=${OUT:-$VISIT/out}
export FASTENC_VISIT_FOLDER=$VISIT FASTENC_RESULTS=$VISIT/results FASTENC_BENCH_GO_ON=1 TRITON_CACHE_DIR=$VISIT/triton
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
START=$SECONDS END=$((SECONDS + 570 * SLOWER)) FAILED=0
mkdir -p "$VISIT/tuned" "$OUT" kernels/tuned
[[ -n $DRY ]] || cp -n "$VISIT"/tuned/sm_*.json kernels/tuned/ 2>/dev/null # the tree may have been copied anew
LOG=$VISIT/log_$PART.txt
: >"$LOG"

left() { echo $((END - SECONDS)); }
bring() { # copies the files to take home that exist
  cp "$LOG" "$VISIT"/quick/*.json "$VISIT"/ncu.csv "$OUT/" 2>/dev/null
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
quick() { # section, most seconds
  stage "$1" "$2" "$RUN benchmarks.gpu_quick $1 --output $VISIT/quick"
}

ARCH=$($PYTHON -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2>/dev/null) || ARCH=9.0
EXTENSION="python/fastenc/libfastenc.so python/fastenc/_C$($PYTHON -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
HAS_CUDA="$PYTHON -c 'from fastenc.ops.library import _C; raise SystemExit(not (_C and _C.build_info()[\"cuda\"]))'"
SOURCE=$({ cat setup.py csrc/*.* csrc/*/*.*; $PYTHON -c 'import sys, torch; print(sys.version, torch.__version__)'; echo "$ARCH"; } | sha256sum | cut -c 1-16)
build() {
  # First its Python alone, which takes two seconds: the stages work without the extension too.
  stage install 60 "FASTENC_BUILD=0 $PYTHON -m pip install -q --no-index --no-build-isolation --no-deps -e ."
  if [[ -f $VISIT/extension-$SOURCE/libfastenc.so ]]; then
    cp "$VISIT/extension-$SOURCE"/* python/fastenc/
    stage extension 30 "$HAS_CUDA" && return
  fi
  stage extension 200 "rm -f $EXTENSION; TORCH_CUDA_ARCH_LIST=$ARCH FASTENC_CUDA=1 $PYTHON setup.py -q build_ext --inplace && $HAS_CUDA && mkdir -p $VISIT/extension-$SOURCE && cp $EXTENSION $VISIT/extension-$SOURCE"
}

build
case $PART in
  1)
    # Texts to pretrain on, which take half a minute to read.
    $PYTHON -c 'from benchmarks.gpu_quick import pretrain; pretrain.texts(pretrain.FOLDER / "texts.txt")' >>"$LOG" 2>&1 &
    quick prewarm 100
    quick check 90
    quick time 60
    quick step 90
    quick pretrain 90
    quick graphs 60
    quick invariant 45
    quick peers 45
    quick rules 60
    if [[ -n $DRY ]]; then
      stage ncu 60 "$RUN benchmarks.gpu_quick.profiled"
    elif command -v ncu >/dev/null; then
      stage ncu 60 "ncu --target-processes all --clock-control none --profile-from-start off --kernel-name 'regex:_kernel|cross_entropy' --launch-count 40 --kill yes --set basic --section WarpStateStats --section InstructionStats --section MemoryWorkloadAnalysis --csv --page details --log-file $VISIT/ncu.csv $RUN benchmarks.gpu_quick.profiled"
    else
      echo "ncu: it is not on the PATH"
    fi
    # Before the sweep, which may take all the time that is left. Of a compiled kernel Triton needs the machine code, not
    # what came before it, which would be more than 16 MiB.
    stage archive 40 "tar cf - -C $VISIT --exclude=*.{source,ttir,ttgir,llir,ptx} triton | xz -T0 -3 >$OUT/cache.tar.xz; tar cf - -C $VISIT extension-$SOURCE | xz -T0 -6 >$OUT/extension.tar.xz"
    export FASTENC_SWEEP_SECONDS=$(($(left) > 60 ? $(left) - 30 : 30))
    quick sweep $((FASTENC_SWEEP_SECONDS + 20))
    ;;
  2)
    # Eight processes: float64 references take up to 10 GiB each. Warnings of other libraries are no failures here.
    HOW="-n 8"
    [[ -n $DRY ]] && HOW=--collect-only
    TESTS="tests/triton tests/cuda tests/ops/test_cudnn_attention.py tests/models/test_gpu_models.py"
    stage tests 300 "$PYTHON -m pytest -q -p no:cacheprovider -W default $HOW $TESTS -k 'not budget and not binaries and not gpu_quick'"
    quick check 90
    quick time 60
    quick step 90
    ;;
  3)
    for mode in training inference; do
      for model in bert-base minilm; do
        stage "$mode of $model" 75 "$RUN benchmarks.bench_models $model $mode --no-compile"
      done
      [[ $mode == training ]] && stage "training of t5-base" 60 "$RUN benchmarks.bench_seq2seq_step"
    done
    if [[ -n $DRY ]]; then # these tell this machine's times
      stage profile 60 "$PYTHON -m fastenc.cli profile minilm --batch-size 2 --length 16 --train -o $VISIT/profile"
      stage host_costs 60 "$PYTHON -m pytest -q -p no:cacheprovider --collect-only benchmarks/test_host_costs.py"
    else
      stage profile 60 "$PYTHON -m fastenc.cli profile bert-base --precision bf16 --batch-size 128 --length 128 --train -o $VISIT/profile"
      stage host_costs 60 "$PYTHON -m benchmarks.bench_host_costs"
    fi
    if command -v compute-sanitizer >/dev/null; then
      stage memcheck 90 "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool memcheck $PYTHON -m tests.helpers.sanitize 'attention*' linear_gelu adamw"
    else
      echo "memcheck: compute-sanitizer is not on the PATH"
    fi
    for op in attention layer_norm masked_cross_entropy bias_gelu linear_gelu embedding_layer_norm; do
      (($(left) > 60)) && stage "bench_$op" "$(left)" "$RUN benchmarks.bench_$op"
    done
    mkdir -p "$VISIT/results" "$VISIT/profile"
    tar cf - -C "$VISIT" results profile | xz -T0 -6 >"$OUT/results.tar.xz"
    ;;
esac
bring
tail -c 7000 "$LOG"
echo "in $OUT after $((SECONDS - START)) s:"
(cd "$OUT" && du -b -- * | sort -n)
if (($(find "$OUT" -type f | wc -l) > 8)) || [[ -n $(find "$OUT" -type f -size +16M) ]]; then
  echo "more than 8 files, or one of more than 16 MiB: not all of it will come back"
  FAILED=1
fi
exit $FAILED
