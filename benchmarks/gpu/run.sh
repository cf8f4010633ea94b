#!/bin/sh
# On a card: every Triton test, compiled for it; then each kernel's benchmark; then whole steps. Results go to OUT.
#     sh benchmarks/gpu/run.sh OUT [PYTHON]          some 20 minutes; each part is bounded, a failure ends none of the others
out=$1
python=${2:-.venv/bin/python}
test -n "$out" || { echo "sh benchmarks/gpu/run.sh OUT [PYTHON]" >&2; exit 2; }
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
"$python" -c "from benchmarks.gpu.card import require_card; require_card()" || exit 2
mkdir -p "$out"
part() {
    name=$1 seconds=$2
    shift 2
    timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
    echo "$name: exit $?"
}
part tests 240 "$python" -m pytest -q tests/kernels tests/runner/test_device_runner.py tests/equivalence/test_triton_models.py -k "triton or device or Triton"
for kernel in attention linear grouped elementwise sampling; do
    part "$kernel" 120 "$python" -m "benchmarks.gpu.$kernel" --json
done
part engine_8b 180 "$python" -m benchmarks.gpu.engine --shape llama-3.1-8b --json
part engine_8b_int4 180 "$python" -m benchmarks.gpu.engine --shape llama-3.1-8b --quantization int4 --json
part engine_0.6b 120 "$python" -m benchmarks.gpu.engine --shape qwen3-0.6b --streams 1 16 64 --json
part engine_30b_a3b 240 "$python" -m benchmarks.gpu.engine --shape qwen3-30b-a3b --streams 1 16 64 --prompts 2048 --json
part engine_70b_int4 240 "$python" -m benchmarks.gpu.engine --shape llama-3.1-70b --quantization int4 --streams 1 16 --prompts 2048 --json
