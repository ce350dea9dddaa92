"""Find names in backticks that no longer exist: `python -m scripts.names`, part of `make lint`.

Read are Markdown outside its code blocks, and comments and docstrings of Python. A path, `cache/dense.py`, must end the
path of a file. A dotted name that begins with one of the packages or classes of `src` must lead, member by member, to
what is defined or imported there. In Python, a single word must be an identifier or a string somewhere in the code; in
`src`, somewhere in `src`. Nothing is imported.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from symtable import symtable

ROOT = Path(__file__).parents[1]
_NOT_READ = ("labs/*", "CHANGELOG.md", "scripts/names.py", "tests/house/test_names.py")  # generated, history, examples
_ELSEWHERE = {
    *("int8_per_token_head", "fp8_per_token_head", "scheduler_reserve_full_isl", "_update_states"),  # vLLM
    *("num_splits_heuristic", "FIFOMixin", "sha256sum"),  # FlashAttention, Ray, coreutils
}
_FENCED = re.compile(r"^([ \t]*(?:```+|~~~+))[^\n]*\n.*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(r"(?!vllm/)\w[\w-]*/[\w/-]+\.py")
_NAME = re.compile(r"([A-Za-z_]\w*(?:(?:\.[A-Za-z_]\w*)+(?::[\w.]+)?)?)(?:\(.*\))?")


class Code:
    """What a repository defines. Args: the text of its Python files, by path; the paths of all files."""

    def __init__(self, sources: dict[str, str], paths: Iterable[str] = ()) -> None:
        parts = [path.split("/") for path in {*sources, *paths}]
        self._ends = {"/".join(each[start:]) for each in parts for start in range(len(each))}
        self._words, self._words_of_src = {*_ELSEWHERE}, {*_ELSEWHERE}
        self._modules, self._classes, self._bases = (defaultdict[str, set[str]](set) for _ in range(3))
        for path, source in sources.items():
            tokens = (token for _, token, is_prose in _tokens(source) if not is_prose)
            words = {re.sub(r"^\w*[\"']|[\"']$", "", each) for each in tokens} | {*re.findall(r"\w+", path)}
            self._words |= words
            if path.startswith("src/"):
                self._words_of_src |= words
                self._add(path[4:-3].removesuffix("/__init__").split("/"), source)

    def _add(self, parts: list[str], source: str) -> None:
        for end in range(1, len(parts)):
            self._modules[".".join(parts[:end])].add(parts[end])
        self._modules[".".join(parts)].update(symtable(source, parts[-1], "exec").get_identifiers())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                self._classes[node.name].update(name for each in ast.walk(node) for name in _defined(each))
                self._bases[node.name].update(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)

    def exists(self, quoted: str, path: str) -> bool:
        """Whether what stands in backticks in a file exists, or is no name of ours."""
        if quoted in self._ends:
            return True
        if not (match := _NAME.fullmatch(quoted)):
            return not _PATH.fullmatch(quoted)
        if match[1] in (self._words_of_src if path.startswith("src/") else self._words):
            return True
        first, *rest = re.split("[.:]", match[1])
        if first not in self._modules:
            return self._has(first, rest) if rest else not path.endswith(".py")
        while first in self._modules and rest:
            name, *rest = rest
            if name not in self._modules[first]:
                return False
            first = f"{first}.{name}"
        return self._has(first.split(".")[-1], rest)

    def _has(self, owner: str, names: list[str]) -> bool:
        """Whether a class (anything else has all names) has a member, and that the next."""
        if not names or owner not in self._classes:
            return True
        if names[0] in self._classes[owner]:
            return self._has(names[0], names[1:])
        return any(base not in self._classes or self._has(base, names) for base in self._bases[owner] - {"Protocol"})


def _defined(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
    return []


def _tokens(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text, whether it is a comment or a docstring: of each token."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        yield token.start[0], token.string, token.type == tokenize.COMMENT or token.string.startswith('"""')


def findings(path: str, content: str, code: Code) -> list[str]:
    """`path:line: name` of each name in a file that does not exist."""
    texts = [(1, _FENCED.sub(lambda match: "\n" * match[0].count("\n"), content))]
    if path.endswith(".py"):
        texts = [(line, text) for line, text, is_prose in _tokens(content) if is_prose]
    return [
        f"{path}:{line + text.count(chr(10), 0, match.start())}: {match[1]} does not exist"
        for line, text in texts
        for match in _QUOTED.finditer(text)
        if not code.exists(match[1], path)
    ]


def main() -> None:
    """Print what was found; status 1 if anything was."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    paths = [path for path in listed.splitlines() if (ROOT / path).is_file()]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if path.endswith((".py", ".md"))}
    code = Code({path: text for path, text in texts.items() if path.endswith(".py")}, paths)
    read = {path: text for path, text in texts.items() if not any(fnmatch(path, pattern) for pattern in _NOT_READ)}
    found = [each for path, text in read.items() for each in findings(path, text, code)]
    print(*found, f"{len(read)} files, {len(found)} findings", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
