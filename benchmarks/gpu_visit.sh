#!/usr/bin/env bash
# A complete visit to a machine with an NVIDIA GPU, no network and the system's Python (torch, triton, transformers):
# build, GPU tests, tuning, every benchmark, profiles, tables and plots.
#
#   benchmarks/gpu_visit.sh [--dry-run] [--list] [--force] [--seconds N] [STAGE ...]
#
#   --dry-run    print what each stage would do here, and do nothing
#   --list       print the stages' names
#   --force      run the named stages (or all) though they are finished, and afresh
#   --seconds N  start no stage later than that, and end the last one then; the next call goes on
#   STAGE        only these stages; a name may end in * ("bench_*")
#
# A stage that has finished is not run again, but for tables and plots, and for what was measured with other tables of
# launch parameters than there are now. One that fails or runs out of its time does not stop the next. At the next call
# tuning and benchmarks go on where they were stopped. Everything lands in gpu-visit/ (state, logs, results, tuned
# tables, summary.txt); with OUT set, also in $OUT, after every stage: summary.txt, visit.tar.gz and profiles.tar.gz.
# Without a GPU the stages that need none run, and the others say that they are skipped.
set -uo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$ROOT"
FOLDER=${VISIT_FOLDER:-$ROOT/gpu-visit}
export FASTENC_RESULTS=$FOLDER/results PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$ROOT/.venv/bin/python
fi

NAMES=() LIMITS=() NEEDS=() COMMANDS=()
stage() { # name, seconds, what it needs ("gpu", this GPU's "tables", a program, or "-"), command line
  NAMES+=("$1") LIMITS+=("$2") NEEDS+=("$3") COMMANDS+=("$4")
}

XDIST=
# The compute capability: 90 and the like.
GPU=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())' 2>/dev/null)
if [[ -n $GPU ]]; then
  # Most of the GPU tests' time is Triton compiling, on one core a process.
  "$PYTHON" -c 'import xdist' 2>/dev/null && XDIST="-n 8"
fi
PYTEST="$PYTHON -m pytest -p no:cacheprovider"
SANITIZER="PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1"
stage env 60 - "uname -a; lscpu | head -20; free -g; nvidia-smi; nvcc --version; $PYTHON -m pip list; $PYTHON -c 'import torch, triton; print(torch.__version__, triton.__version__)'"
# Beside a GPU an extension without CUDA code is none: setup.py would leave it out where it finds no CUDA.
BUILT="$PYTHON -c 'import fastenc._C'"
if [[ -n $GPU ]]; then
  BUILT="$PYTHON -c 'from fastenc import _C; raise SystemExit(None if _C.build_info()[\"cuda\"] else \"the extension has no CUDA code: remove build/ and python/fastenc/_C*.so, and build again\")'"
fi
INSTALL="PIP_BREAK_SYSTEM_PACKAGES=1 $PYTHON -m pip install --no-index --no-build-isolation --no-deps -e ."
# Triton's kernels need no extension: where it does not compile, the other stages go on without it.
stage build 560 - "${GPU:+FASTENC_CUDA=1 }$INSTALL && $PYTHON -m fastenc.cli info && $BUILT || { code=\$?; FASTENC_BUILD=0 $INSTALL; echo 'the extension did not compile: the next stages go on without it'; exit \$code; }"
for file in tests/*/test_gpu_*.py tests/*/test_*_cuda.py; do
  name=$(basename "$file" .py) name=${name#test_}
  stage "tests_gpu_${name#gpu_}" 560 gpu "$PYTEST $XDIST $file"
done
for file in tests/*/test_*_triton.py tests/models/test_once_a_batch.py tests/ops/test_strided_inputs.py tests/triton/test_tune.py; do
  name=$(basename "$file" .py)
  stage "tests_${name#test_}" 560 - "$PYTEST $XDIST $file"
done
stage tests_binaries 560 - "$PYTEST tests/triton/test_triton_binaries.py -k 'not budget'"
for capability in 80 89 90 100; do
  stage "tests_binaries_$capability" 560 - "$PYTEST tests/triton/test_triton_binaries.py -k 'budget and $capability'"
done
stage tests_cuda_binaries 300 - "$PYTEST tests/cuda/test_cuda_binaries.py"
stage numerics 300 gpu "$PYTHON -m benchmarks.numerics"
for tool in memcheck racecheck; do
  stage "${tool}_attention" 560 compute-sanitizer "$SANITIZER --tool $tool $PYTHON -m tests.helpers.sanitize 'attention*'"
  stage "${tool}_others" 560 compute-sanitizer "$SANITIZER --tool $tool $PYTHON -m tests.helpers.sanitize '[!a]*'"
done
# A candidate may compile for a minute. What the table changes is tested again.
stage tune 580 gpu "$PYTHON -m benchmarks.run --tune --seconds \$((STAGE_SECONDS > 120 ? STAGE_SECONDS - 60 : STAGE_SECONDS / 2))"
stage tests_tuned 560 tables "$PYTEST $XDIST tests/*/test_*_triton.py"
stage tests_tuned_binaries 560 tables "$PYTEST tests/triton/test_triton_binaries.py -k 'budget and $GPU'"
for file in benchmarks/bench_*.py; do
  name=$(basename "$file" .py)
  case ${name#bench_} in models | encoder | families | gemm | mlm_step) ;; # one stage a model below; the others are for CPUs
    attention) for part in plain variants; do stage "${name}_$part" 560 gpu "$PYTHON -m benchmarks.$name $part"; done ;;
    *) stage "$name" 560 gpu "$PYTHON -m benchmarks.$name" ;;
  esac
done
for model in minilm bert-base bert-large xlm-r-base; do
  for mode in inference training; do
    stage "models_${model}_$mode" 560 gpu "$PYTHON -m benchmarks.bench_models $model $mode"
  done
done
for model in minilm bert-base bert-large; do
  common="$PYTHON -m fastenc.cli profile $model --precision bf16 --batch-size 128 --length 128"
  stage "profile_${model}_inference" 300 gpu "$common -o $FOLDER/profile_${model}_inference"
  stage "profile_${model}_training" 300 gpu "$common --train -o $FOLDER/profile_${model}_training"
done
stage tables 60 - "$PYTHON -m benchmarks.tables --output $FOLDER/tables.md"
stage plots 120 - "$PYTHON -m benchmarks.plots $FOLDER/plots"

DRY= FORCE= END= WANTED=()
while (($#)); do
  case $1 in
    --dry-run) DRY=1 ;;
    --list) printf '%s\n' "${NAMES[@]}"; exit ;;
    --force) FORCE=1 ;;
    --seconds) END=$((SECONDS + $2)); shift ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d'; exit ;;
    -*) echo "gpu_visit.sh: no such option: $1" >&2; exit 2 ;;
    *) WANTED+=("$1") ;;
  esac
  shift
done

wanted() { # is the stage asked for?
  ((${#WANTED[@]})) || return 0
  local pattern
  for pattern in "${WANTED[@]}"; do
    # shellcheck disable=SC2053  # a pattern on purpose
    [[ $1 == $pattern ]] && return 0
  done
  return 1
}
for pattern in "${WANTED[@]:+${WANTED[@]}}"; do
  # shellcheck disable=SC2053
  for name in "${NAMES[@]}"; do [[ $name == $pattern ]] && continue 2; done
  echo "gpu_visit.sh: no such stage: $pattern (see --list)" >&2
  exit 2
done

obstacle() { # why a stage that needs $1 cannot run here
  case $1 in
    -) return 1 ;;
    gpu) [[ -z $GPU ]] && echo "no GPU that $PYTHON's torch sees" ;;
    tables) if [[ -z $GPU ]]; then echo "no GPU"; elif [[ ! -e kernels/tuned/sm_$GPU.json ]]; then echo "nothing is tuned for sm_$GPU"; else return 1; fi ;;
    *) if [[ -z $GPU ]]; then echo "no GPU"; elif ! command -v "$1" >/dev/null; then echo "$1 is not on the PATH"; else return 1; fi ;;
  esac
}

measured_with() { # the tables that stage $1's result belongs to; nothing where it has none or they do not matter
  case $1 in
    tests_tuned* | bench_* | models_* | profile_*) cat kernels/tuned/*.json 2>/dev/null | sha256sum ;;
  esac
}
finished() { # does stage $1 need no other run?
  [[ -e $FOLDER/done/$1 && $(<"$FOLDER/done/$1") == "$(measured_with "$1")" ]] || return 1
  [[ $1 != build ]] || bash -c "$BUILT" 2>/dev/null
}

mkdir -p "$FOLDER/done" "$FOLDER/logs"
keep_tables() { # tables of launch parameters from folder $1 that folder $2 lacks, or has older
  compgen -G "$1/*.json" >/dev/null || return 0
  mkdir -p "$2" && cp --update --preserve=timestamps "$1"/*.json "$2"
}
# The machine may be another one than the folder remembers.
[[ -n $DRY ]] || keep_tables "$FOLDER/tuned" kernels/tuned
LINES_OF_SUMMARY=() FAILED=0
report() {
  local line
  line=$(printf '%-32s %-10s %5s s  %s' "$1" "$2" "$3" "$4")
  echo "$line"
  LINES_OF_SUMMARY+=("$line")
}
keep_results() { # what there is so far, where it outlives this machine; profiles, which are large, apart
  keep_tables kernels/tuned "$FOLDER/tuned"
  printf '%s\n' "${LINES_OF_SUMMARY[@]:+${LINES_OF_SUMMARY[@]}}" >"$FOLDER/summary.txt"
  [[ -n ${OUT:-} ]] || return 0
  mkdir -p "$OUT"
  cp "$FOLDER/summary.txt" "$OUT/"
  tar czf "$OUT/visit.tar.gz" -C "$FOLDER" --exclude='profile_*' .
  [[ $1 != profile_* ]] || tar czf "$OUT/profiles.tar.gz" -C "$FOLDER" $(cd "$FOLDER" && ls -d profile_*)
}
for place in "${!NAMES[@]}"; do
  name=${NAMES[place]} limit=${LIMITS[place]}
  wanted "$name" || continue
  if why=$(obstacle "${NEEDS[place]}"); then
    report "$name" skipped 0 "$why"
    continue
  fi
  if [[ -z $FORCE ]] && finished "$name"; then
    report "$name" finished 0 "before; --force runs it again"
    continue
  fi
  if [[ -n $DRY ]]; then
    report "$name" "would run" 0 "at most $limit s: ${COMMANDS[place]}"
    continue
  fi
  if [[ -n $END ]]; then
    left=$((END - SECONDS))
    if ((left < 20)); then
      report "$name" "not begun" 0 "the time is up; the next call goes on here"
      continue
    fi
    ((left < limit)) && limit=$left
  fi
  start=$SECONDS with=$(measured_with "$name")
  rm -f "$FOLDER/done/$name"
  export STAGE_SECONDS=$limit FASTENC_BENCH_END=$(($(date +%s) + limit)) FASTENC_BENCH_GO_ON=1
  [[ -n $FORCE ]] && unset FASTENC_BENCH_GO_ON
  timeout --kill-after=15 "$limit" bash -c "${COMMANDS[place]}" >"$FOLDER/logs/$name.log" 2>&1
  code=$?
  if ((code == 0)); then
    # Cheap, and of whatever results there are by then.
    [[ $name == tables || $name == plots ]] || echo "$with" >"$FOLDER/done/$name"
    report "$name" passed $((SECONDS - start)) "$(tail -n 1 "$FOLDER/logs/$name.log" | cut -c 1-100)"
  elif ((code == 75)); then
    report "$name" unfinished $((SECONDS - start)) "the next call goes on here"
  else
    FAILED=1
    why="code $code: $(tail -n 1 "$FOLDER/logs/$name.log" | cut -c 1-100)"
    ((code == 124 || code == 137)) && why="out of time after $limit s"
    report "$name" FAILED $((SECONDS - start)) "$why"
  fi
  keep_results "$name"
done

[[ -n $DRY ]] && exit
echo
echo "summary, logs and results in $FOLDER"
[[ -z ${OUT:-} ]] || echo "and in $OUT"
exit $FAILED
