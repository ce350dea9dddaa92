#!/usr/bin/env bash
# Make .venv and install everything into it from constraints.txt. `make` calls this; so can you.
# PYTHON=/path/to/python3.12 scripts/setup.sh chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  printf '\n\033[1;31mminicache cannot be set up:\033[0m %s\n' "$1" >&2
  exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer ($("$PYTHON" --version 2>&1 || true))."
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "it needs Python 3.11 or newer, and $(python3 --version 2>&1 || echo 'no python3 at all') was found.
  Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv · macOS: brew install python@3.12)
  and run the command again, or name it: make PYTHON=/path/to/python3.12 …"
}

python=$(find_python)
if [ ! -x .venv/bin/pip ]; then
  echo "Making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv || fail "$python cannot make a virtual environment.
  On Debian and Ubuntu that is a package of its own: apt install $(basename "$python")-venv"
fi

echo "Installing torch, the largest part (a few minutes the first time)"
.venv/bin/pip install --disable-pip-version-check -c constraints.txt "$(grep '^torch==' constraints.txt)" ||
  fail "$(grep '^torch==' constraints.txt) could not be installed for $(.venv/bin/python --version) on $(uname -sm).
  pip's own message stands above. Usual reasons: no network; a Python newer than torch's wheels (try 3.11 or 3.12);
  a 32-bit or otherwise unsupported machine. docs/en/setup.md says how to get the small CPU-only build."
echo "Installing minicache and everything else from constraints.txt (200 packages, a few minutes the first time)"
.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]" ||
  fail "a package could not be installed: pip's own message stands above."
echo "Compiling the kernels for this CPU (half a minute)"
.venv/bin/python - <<'PY'
from minicache.kernels import cpu

if cpu.is_available():  # else the engine computes in PyTorch
    from minicache.kernels.cpu.warming import warm_up

    for dtype in cpu.NUMBERS:  # of caches: tests would wait for them otherwise
        warm_up(dtype=dtype)
PY
# Even where PYTHONDONTWRITEBYTECODE is set: each `minicache` would compile its modules again.
.venv/bin/python -m compileall -q src
touch .venv/.installed
