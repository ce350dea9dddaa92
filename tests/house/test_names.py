"""The check of names in backticks finds those that are gone, and leaves other projects' alone."""

from __future__ import annotations

import pytest
from scripts.names import Code, findings

CODE = Code(
    {
        "src/minicache/cache/__init__.py": "from minicache.cache.dense import KVCache as KVCache\n",
        "src/minicache/cache/dense.py": (
            'class Base(Protocol):\n    size: int\n\nclass KVCache(Base):\n    """Not `told` here."""\n'
            "    def append(self, layer):\n        self.num_tokens = layer\n\nclass Odd(torch.nn.Module):\n    ...\n"
        ),
        "benchmarks/fast.py": 'NAMES = ["by_hand"]\n',
    },
    ["docs/en/minicache.po"],
)


@pytest.mark.parametrize(
    "quoted",
    [
        "minicache.cache.paged",
        "minicache.cache.dense.PagedKVCache",
        "minicache.cache.dense:KVCache.read",
        "minicache.cache.KVCache.read",
        "minicache.cache.append",
        "KVCache.read(layer)",
        "KVCache.told",
        "cache/paged.py",
        "labs/phase-01-dense-cache/cache/dense.py",
    ],
)
def test_it_finds_what_does_not_exist(quoted: str) -> None:
    text = f"# A page\n\n```\n`{quoted}` in a block of code\n```\n\nHere: `{quoted}`.\n"
    assert findings("docs/en/page.md", text, CODE) == [f"docs/en/page.md:7: {quoted} does not exist"]


@pytest.mark.parametrize(
    "quoted",
    [
        "minicache.cache.dense",
        "minicache.cache.dense:KVCache.append",
        "minicache.cache.KVCache.num_tokens",
        "KVCache.append(layer)",
        "KVCache.size",
        "Odd.forward",
        "cache/dense.py",
        "vllm/core/scheduler.py",
        "minicache:requests_total",
        "minicache.po",
        "torch.float32",
        "cache.read",
        "anything",
        "pip install minicache.nothing",
    ],
)
def test_it_leaves_the_rest_alone(quoted: str) -> None:
    assert not findings("docs/en/page.md", f"`{quoted}`\n", CODE)


def test_in_python_it_reads_docstrings_and_comments_and_every_word() -> None:
    text = '"""First.\n\nWith `append` and\n`optional`.\n"""\nnames = "`optional`"  # `by_hand`, `KVCache.read`\n'
    assert findings("src/minicache/module.py", text, CODE) == [
        "src/minicache/module.py:4: optional does not exist",
        "src/minicache/module.py:6: by_hand does not exist",
        "src/minicache/module.py:6: KVCache.read does not exist",
    ]
    assert len(findings("tests/test_module.py", text, CODE)) == 2
