#!/bin/sh
# On a card: everything that must be shown of it, what is worth most first.
#     sh benchmarks/gpu/run.sh OUT [PYTHON [first|second|third|fourth|all]]     each takes less than ten minutes
# Each part is bounded; one that fails, or is ended, ends none of the others, and what it had found until then counts.
# Results are lines of OUT/first.jsonl and so on; `python -m benchmarks.gpu.goals OUT` says what they come to.
# MODELS is a folder of small checkpoints, whose tokens are compared beside the packaged model's.
# TINY=1 runs every part in its smallest sizes, without a card in Triton's interpreter: to try this script.
out=$1
python=${2:-.venv/bin/python}
which=${3:-all}
test -n "$out" || { echo "sh benchmarks/gpu/run.sh OUT [PYTHON [first|second|third|fourth|all]]" >&2; exit 2; }
case $which in first|second|third|fourth|all) ;; *) echo "first, second, third, fourth or all, not $which" >&2; exit 2;; esac
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
tiny=${TINY:+--tiny}
test -n "$tiny" && export TRITON_INTERPRET=1
test -n "$tiny" || "$python" -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'no CUDA device')" || exit 2
mkdir -p "$out" || exit 2
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT

is_wanted() { test "$which" = all || test "$which" = "$1"; }

# part NAME SECONDS COMMAND ...      SIGTERM when the seconds are over, and SIGKILL if that is not heard
part() {
    name=$1 seconds=$2
    shift 2
    begin=$(date +%s)
    timeout -k 15 "$seconds" "$@" >"$scratch/out" 2>"$scratch/err"
    status=$?
    "$python" -m benchmarks.gpu.collect "$out/$call.jsonl" "$name" $status $(($(date +%s) - begin)) "$scratch/out" "$scratch/err"
}

# bench NAME SECONDS MODULE ARGUMENTS ...
bench() {
    name=$1 seconds=$2 module=$3
    shift 3
    test -n "$tiny" && set -- $tiny
    part "$name" "$seconds" "$python" -m "benchmarks.gpu.$module" "$@" --json
}

call=first
if is_wanted $call; then
    bench parity 90 parity ${MODELS:+--models "$MODELS"}
    bench engine_8b 170 engine --shape llama-3.1-8b --streams 1 64 256 16
    bench engine_0.6b 60 engine --shape qwen3-0.6b --streams 1 64 --arms ahead captured
    bench engine_8b_int4 100 engine --shape llama-3.1-8b --quantization int4 --streams 1 64 256 --arms ahead captured
    bench attention 130 attention
fi
call=second
if is_wanted $call; then
    bench reversals_mechanisms 230 reversals batching reservation chunking prefix_cache --repeats 2
    bench reversals_weights 60 reversals weights
    bench reversals_cache 60 reversals cache
    bench generate 220 generate
fi
call=third
if is_wanted $call; then
    bench attention_peers 100 attention --peers --batches 1 64
    bench engine_30b_a3b 80 engine --shape qwen3-30b-a3b --streams 1 64 --prompts 2048 --arms ahead
    bench engine_70b_int4 80 engine --shape llama-3.1-70b --quantization int4 --streams 1 16 --prompts 2048 --arms ahead
    bench offload 90 offload --prompts 2048 8192 --repeats 3
    bench sleep 100 sleep --repeats 1
    part tests 140 "$python" -m pytest -q --maxfail 20 tests/kernels tests/runner/test_device_runner.py tests/runner/test_host_store.py tests/runner/test_offload_engine.py tests/equivalence/test_triton_models.py -k "triton or device or Triton or host_store or offload"
fi
call=fourth
if is_wanted $call; then
    bench variants 260 variants --seconds 240
    bench linear 90 linear --model llama-3.1-8b
    bench grouped 60 grouped
    bench elementwise 45 elementwise
    bench sampling 45 sampling
    bench joined 25 joined
    bench engine_qwen3_8b 70 engine --shape qwen3-8b --streams 1 64 --arms ahead
fi
"$python" -m benchmarks.gpu.goals "$out"
