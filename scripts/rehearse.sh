#!/usr/bin/env bash
# Rehearse a release as a learner meets it: pip installs an older version, the course is taken, and pip and `minicache
# update` bring the wheel in dist/. The packages that it needs are pip's to find, so this takes minutes and a network.
# PYTHON=python3.12 scripts/rehearse.sh chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export LANGUAGE=en # what commands print is looked at

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "The rehearsal: $1" >&2
  exit 1
}

[ "$(ls dist/*.whl | wc -l)" -eq 1 ] || fail "dist/ must have one wheel: make clean release"
version=$(basename dist/*.whl | cut -d- -f2)
if [ "${GITHUB_REF_TYPE:-}" = tag ] && [ "$GITHUB_REF_NAME" != "v$version" ]; then
  fail "the tag is $GITHUB_REF_NAME, and the wheel is $version: src/minicache/__init__.py has the version"
fi

echo "An index with $version, an older version, and a package called minicache that cannot be installed"
mkdir "$folder/index" "$folder/older" "$folder/minicache-0.0.1"
cp dist/*.whl "$folder/index"
cp -R pyproject.toml README.md LICENSE LICENSE-docs src labs tests notebooks "$folder/older"
perl -pi -e 's/^__version__ = .*/__version__ = "0.1.dev0"/' "$folder/older/src/minicache/__init__.py"
for module in arithmetic/arithmetic cache/dense; do
  perl -pi -e 's/"""/"""Older. / if $. == 1' "$folder/older/src/minicache/$module.py"
done
printf '[build-system]\nrequires = []\nbuild-backend = "decoy"\nbackend-path = ["."]\n' >"$folder/minicache-0.0.1/pyproject.toml"
echo 'raise SystemExit("minicache is the package of another project")' >"$folder/minicache-0.0.1/decoy.py"
tar -czf "$folder/index/minicache-0.0.1.tar.gz" -C "$folder" minicache-0.0.1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS="$folder/index ${PIP_FIND_LINKS:-}"

"${PYTHON:-python3}" -m venv "$folder/venv"
bin=$folder/venv/bin
"$bin/pip" wheel --quiet --no-deps --wheel-dir "$folder/index" "$folder/older"
"$bin/pip" download --quiet --no-deps --no-index --dest "$folder" minicache 2>/dev/null && fail "the decoy can be built"

echo "Installing the older version, and taking the course"
"$bin/pip" install --quiet "minicache-course[course]==0.1.dev0"
reference=$("$bin/python" -c 'import minicache; print(minicache.__path__[0])')
cd "$folder" # away from the checkout, whose files must not stand in for the wheel's
"$bin/minicache" --version | grep -F 0.1.dev0
"$bin/minicache" init my-course >/dev/null
cd my-course
"$bin/minicache" doctor || fail "doctor finds something missing"
"$bin/minicache" grade 0 >/dev/null && fail "the starters pass phase 0"
cp "$reference"/arithmetic/{paper,arithmetic}.py labs/phase-00-decode-arithmetic/arithmetic/
"$bin/minicache" grade 0 | grep "100 of 100 points" || fail "the reference does not pass phase 0"

echo "Updating to $version"
"$bin/pip" install --quiet --upgrade "minicache-course[course]==$version"
"$bin/minicache" --version | grep -F "$version"
"$bin/minicache" update
grep -q Older labs/phase-01-dense-cache/cache/dense.py && fail "update leaves an old starter"
[ -f labs/phase-00-decode-arithmetic/arithmetic/arithmetic.new.py ] || fail "update brings no new starter"
"$bin/minicache" update | grep "nothing to do" || fail "update has not remembered what it did"
"$bin/minicache" grade 0 | grep "100 of 100 points" || fail "update touched what was written"
"$bin/minicache" generate "Yesterday I"
du -sh "$folder/venv" # what docs/en/setup.md says
