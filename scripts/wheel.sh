#!/usr/bin/env bash
# Build the wheel, install it into an empty environment, and take the course there: nothing of the checkout may be missing.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
export LANGUAGE=en # what commands print is looked at

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "The wheel: $1" >&2
  exit 1
}

[ -f site/index.html ] || .venv/bin/python -m scripts.docs site
echo "Building the wheel"
.venv/bin/python -m hatchling build -t wheel -d "$folder"
echo "Installing it"
.venv/bin/python -m venv --without-pip "$folder/venv"
.venv/bin/pip --quiet --disable-pip-version-check --python "$folder/venv" install --no-deps "$folder"/minicache_course-*.whl
site_packages=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
bin=$folder/venv/bin

# Away from the checkout, whose files must not stand in for the wheel's.
.venv/bin/python -m scripts.link_requirements "$site_packages" minicache-course
cd "$folder"
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
for name in ("py.typed", *(f"serving/http/static/{each}" for each in ("index.html", "live.js", "live.css"))):
    assert files(minicache).joinpath(name).is_file(), f"the wheel has no {name}"
PYTHON
"$bin/minicache" generate "Yesterday I" # the shipped checkpoint
printed=$("$bin/minicache" init my-course 2>&1) && fail "init needs more than the package, and does not say so"
grep -qF "minicache-course[course]" <<<"$printed" || fail "init does not say which extra it needs"

echo "The engine alone"
cd "$checkout"
.venv/bin/python -m venv --without-pip "$folder/engine"
.venv/bin/pip --quiet --disable-pip-version-check --python "$folder/engine" install --no-deps "$folder"/minicache_course-*.whl
engine_packages=${site_packages/"$folder/venv"/"$folder/engine"}
rm -r "$engine_packages"/minicache_{course,teach,cli}
.venv/bin/python -m scripts.link_requirements "$engine_packages" torch numpy safetensors rich
cd "$folder"
"$folder/engine/bin/python" -c 'from minicache import LLM, SamplingParams; print(LLM().generate(["Yesterday I"], SamplingParams())[0].text)' ||
  fail "the engine needs the course, its command line, or a package that is not torch, numpy, safetensors or rich"

echo "Taking the course"
cd "$checkout"
.venv/bin/python -m scripts.link_requirements "$site_packages" 'minicache-course[course]'
.venv/bin/minicache init "$folder/from-the-checkout" >/dev/null
cd "$folder"
"$bin/minicache" init my-course
diff -r from-the-checkout my-course || fail "init makes another folder from the wheel than from the checkout"
cd my-course
grep -q "not graded yet" <<<"$("$bin/minicache" status)" || fail "status does not list the tasks"
grep -q "Tus archivos" <<<"$("$bin/minicache" --lang es status)" || fail "it has no Spanish"
"$bin/minicache" doctor >doctor.log || fail "doctor finds something missing: $(cat doctor.log)"
"$bin/minicache" grade 0 >/dev/null && fail "the starters pass phase 0"
cp "$site_packages"/minicache/arithmetic/{paper,arithmetic}.py labs/phase-00-decode-arithmetic/arithmetic/
"$bin/minicache" grade 0 | grep "100 of 100 points" || fail "the reference does not pass phase 0"
"$bin/python" -m pytest -q --mine tests/phase-00-decode-arithmetic | tail -1
"$bin/python" -m pytest -q --co tests | tail -1 # every phase's tests can be imported
"$bin/python" -m pytest -q tests/phase-09-chunked-prefill -k vllm | tail -1 # they read a file
"$bin/python" -m nbconvert --log-level ERROR --to notebook --execute --inplace notebooks/phase-00-decode-arithmetic.ipynb
"$bin/minicache" docs 0.2 >docs.log &
docs=$!
until grep -q http docs.log; do sleep 0.1; done
"$bin/python" -c 'import sys, urllib.request as u; assert "write the arithmetic" in u.urlopen(sys.argv[1]).read().decode()' \
  "$(grep -o 'http[^ ]*' docs.log)" || fail "docs does not show the page of task 0.2"
kill "$docs"

echo "Updating it"
# The next version: two modules that people build have changed; one of its files was edited above, the other was not.
"$bin/python" - "$site_packages"/minicache/{arithmetic/arithmetic,cache/dense}.py <<'PYTHON'
import sys
from pathlib import Path

for file in map(Path, sys.argv[1:]):
    file.write_text(file.read_text().replace('"""', '"""Next version. ', 1))
PYTHON
"$bin/minicache" update
grep -q "Next version" labs/phase-01-dense-cache/cache/dense.py || fail "update leaves an old starter"
grep -q "Next version" labs/phase-00-decode-arithmetic/arithmetic/arithmetic.new.py || fail "update brings no new starter"
grep -q "nothing to do" <<<"$("$bin/minicache" update)" || fail "update has not remembered what it did"
"$bin/minicache" grade 0 | grep "100 of 100 points" || fail "update touched what was written"
