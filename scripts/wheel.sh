#!/usr/bin/env bash
# Build the wheel, install it into an empty environment, and use it there: nothing of the checkout may be missing.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "Building the wheel"
.venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" .
echo "Installing it from constraints.txt"
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/pip" install --disable-pip-version-check -c constraints.txt "$folder"/minicache-*.whl

cd "$folder" # away from the checkout, whose files must not stand in for the wheel's
bin=$folder/venv/bin
"$bin/minicache" --help >/dev/null
# The lower floor is pure standard library; it and `import minicache` bring in nothing else.
"$bin/python" - <<'PYTHON'
import sys
from importlib.resources import files

import minicache
from minicache.grammar import Tokenizer
from minicache.memory.blocks import BlockPool
from minicache.scheduler import create_scheduler

assert not {"torch", "numpy"} & sys.modules.keys()
BlockPool(num_blocks=4, block_size=16).check()
create_scheduler("paged", num_blocks=4)
print(Tokenizer().vocab_size, "words in the language")
for name in ("py.typed", "server/static/index.html", "server/static/live.js", "server/static/live.css"):
    assert files(minicache).joinpath(name).is_file(), f"the wheel has no {name}"
PYTHON
"$bin/minicache" generate "Yesterday I" # the shipped checkpoint
