"""The functions of `minicache.kernels`: what they refuse, for every backend alike, and what they call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from minicache import kernels
from minicache.kernels import oracle, plain

BLOCKS, SIZE, HEADS, DIM = 5, 4, 2, 8


def caches(dtype=torch.float32):
    return [torch.randn(BLOCKS, SIZE, HEADS, DIM).to(dtype) for _ in range(2)]


def stored(**changes):
    """Arguments of store_kv for three rows."""
    k_cache, v_cache = caches()
    k, v = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": torch.tensor([4, -1, 0])} | changes


def decoded(**changes):
    """Arguments of paged_decode_attention for two sequences of 6 and 3 tokens."""
    k_cache, v_cache = caches()
    tables, lens = torch.tensor([[3, 1], [0, 99]]), torch.tensor([6, 3])
    given = {"q": torch.randn(2, 4, DIM), "k_cache": k_cache, "v_cache": v_cache}
    return given | {"block_tables": tables, "context_lens": lens} | changes


def prefilled(**changes):
    """Arguments of paged_prefill_attention: of the same sequences, the 4 and the 3 newest tokens."""
    return decoded(q=torch.randn(7, 4, DIM), query_start_loc=torch.tensor([0, 4, 7])) | changes


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed():
    """`import minicache.kernels` brings in neither Triton nor a kernel: a learner's file may stand in for one."""
    code = (
        "import sys, minicache.kernels\n"
        "print(*sorted(m for m in sys.modules if m in ('triton', 'numba') or m.startswith('minicache.kernels.')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    dispatch = ("backends", "checks", "every_option", "metadata")
    assert printed.split() == [f"minicache.kernels.{name}" for name in dispatch]


@pytest.mark.parametrize("backend", [None, "torch"])
def test_cpu_tensors_take_pytorch(backend):
    given = decoded()
    got = kernels.paged_decode_attention(**given, backend=backend)
    torch.testing.assert_close(got, plain.paged_decode_attention(**given))
    given = prefilled()
    got = kernels.paged_prefill_attention(**given, backend=backend)
    torch.testing.assert_close(got, plain.paged_prefill_attention(**given))
    given, same = stored(), stored()
    same |= {name: given[name].clone() for name in given}
    kernels.store_kv(**given, backend=backend)
    plain.store_kv(**same)
    assert given["k_cache"].equal(same["k_cache"])
    assert given["v_cache"].equal(same["v_cache"])
    table = torch.tensor([4, 2, 99])
    got = kernels.gather_kv(given["k_cache"], table, 7, backend=backend)
    assert got.equal(plain.gather_kv(given["k_cache"], table, 7))


@pytest.mark.parametrize(
    "option",
    [
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"k_scale": 0.5},
        {"v_scale": torch.tensor([0.5, 2.0])},
        {"softcap": 5.0},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_takes_the_oracle_that_has_it(option):
    """Each option has an effect, and it is the oracle's."""
    given = decoded()
    got = kernels.paged_decode_attention(**given, **option)
    assert got.equal(oracle.attention(**given, **option))
    assert not torch.allclose(got, plain.paged_decode_attention(**given), atol=1e-4)
    given = prefilled()
    got = kernels.paged_prefill_attention(**given, **option)
    assert got.equal(oracle.attention(**given, **option))
    assert not torch.allclose(got, plain.paged_prefill_attention(**given), atol=1e-4)


def test_one_metadata_serves_all_layers():
    """With it a layer gets the results of the functions that take everything at each call."""
    for given, attend in ((decoded(), kernels.paged_decode_attention), (prefilled(), kernels.paged_prefill_attention)):
        starts = given.get("query_start_loc")
        metadata = kernels.AttentionMetadata(given["block_tables"], given["context_lens"], starts)
        for window in (None, 2, None, 100):
            for _ in range(2):
                given["k_cache"], given["v_cache"] = caches()
                got = kernels.paged_attention(
                    given["q"], given["k_cache"], given["v_cache"], metadata, sliding_window=window
                )
                assert got.equal(attend(**given, sliding_window=window))


def test_metadata_is_no_reason_to_take_any_query():
    given = decoded()
    metadata = kernels.AttentionMetadata(given["block_tables"], given["context_lens"])
    paged = (given["k_cache"], given["v_cache"], metadata)
    for q, error in (
        (given["q"].half(), TypeError),
        (given["q"][..., 1:], ValueError),
        (given["q"][:, 1:], ValueError),
    ):
        with pytest.raises(error):
            kernels.paged_attention(q, *paged)
    for window, error in ((0, ValueError), (2.0, TypeError)):
        with pytest.raises(error):
            kernels.paged_attention(given["q"], *paged, sliding_window=window)


@pytest.mark.parametrize("num_splits", [1, 2, 64])
def test_pytorch_does_not_split(num_splits):
    given = decoded()
    got = kernels.paged_decode_attention(**given, num_splits=num_splits)
    assert got.equal(kernels.paged_decode_attention(**given))


def test_a_meta_tensor_has_a_shape_and_no_values():
    """Shapes and dtypes flow through, and no one asks for a value."""
    on_meta = {name: value.to("meta") for name, value in stored().items()}
    kernels.store_kv(**on_meta)
    got = kernels.gather_kv(on_meta["k_cache"], torch.zeros(3, dtype=torch.int64, device="meta"), 9)
    assert (got.shape, got.device.type) == ((9, HEADS, DIM), "meta")
    for function, given in (
        (kernels.paged_decode_attention, decoded()),
        (kernels.paged_prefill_attention, prefilled()),
    ):
        got = function(**{name: value.to("meta") for name, value in given.items()})
        assert (got.shape, got.device.type) == (given["q"].shape, "meta")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        pytest.param({"k": None}, TypeError, id="no tensor"),
        pytest.param({"k": torch.randn(2, HEADS, DIM)}, ValueError, id="fewer keys than slots"),
        pytest.param({"v": torch.randn(3, HEADS, DIM + 1)}, ValueError, id="values of another head size"),
        pytest.param({"v": torch.randn(3, 1, DIM)}, ValueError, id="one head, which would broadcast"),
        pytest.param({"k": torch.randn(3, HEADS, DIM).half()}, TypeError, id="keys in half precision"),
        pytest.param({"k": torch.randn(3, HEADS, DIM, device="meta")}, ValueError, id="another device"),
        pytest.param({"slot_mapping": torch.tensor([0.0, 1, 2])}, TypeError, id="slots that are floats"),
        pytest.param({"slot_mapping": torch.tensor([[0, 1, 2]])}, ValueError, id="slots in two dimensions"),
        pytest.param({"slot_mapping": [0, 1, 2]}, TypeError, id="slots in a list"),
        pytest.param({"slot_mapping": torch.tensor([0, 20, 2])}, IndexError, id="a slot past the last"),
        pytest.param({"slot_mapping": torch.tensor([0, -2, 2])}, IndexError, id="slot −2"),
        pytest.param({"v_cache": torch.randn(BLOCKS, SIZE, HEADS, DIM + 1)}, ValueError, id="caches unlike"),
        pytest.param({"v_cache": torch.randn(BLOCKS, SIZE, HEADS, DIM).half()}, TypeError, id="caches of two dtypes"),
        pytest.param({"k_cache": torch.randn(DIM, HEADS, SIZE, BLOCKS).permute(3, 2, 1, 0)}, ValueError, id="strided"),
        pytest.param({"backend": "cuda"}, ValueError, id="an unknown backend"),
    ],
)
def test_store_refuses(changes, error):
    given = stored(**changes)
    before = [given[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(error):
        kernels.store_kv(**given)
    assert all(given[name].equal(then) for name, then in zip(("k_cache", "v_cache"), before, strict=True))


@pytest.mark.parametrize(
    ("table", "num_tokens", "error"),
    [
        ([0, 1], 9, ValueError),
        ([0, 1], -1, ValueError),
        ([0, 1], 2.0, TypeError),
        ([0, 1], True, TypeError),
        ([0, 5], 5, IndexError),
        ([0, -1], 5, IndexError),
        ([[0, 1]], 5, ValueError),
        ([0.0, 1.0], 5, TypeError),
    ],
    ids=str,
)
def test_gather_refuses(table, num_tokens, error):
    with pytest.raises(error):
        kernels.gather_kv(caches()[0], torch.tensor(table), num_tokens)


ATTENTION_REFUSES = [
    pytest.param({"q": torch.randn(2, 3, DIM)}, ValueError, id="3 query heads on 2 kv heads"),
    pytest.param({"q": torch.randn(2, 4, DIM + 1)}, ValueError, id="another head size"),
    pytest.param({"q": torch.randn(2, 1, 4, DIM)}, ValueError, id="four dimensions"),
    pytest.param({"q": torch.randn(2, 4, DIM).bfloat16()}, TypeError, id="another dtype"),
    pytest.param({"q": [1.0]}, TypeError, id="a list"),
    pytest.param({"q": torch.randn(3, 4, DIM)}, ValueError, id="more queries than sequences"),
    pytest.param({"block_tables": torch.tensor([3, 1])}, ValueError, id="tables in one dimension"),
    pytest.param({"block_tables": torch.tensor([[3.0, 1], [0, 0]])}, TypeError, id="tables of floats"),
    pytest.param({"block_tables": torch.tensor([[3, 5], [0, 0]])}, IndexError, id="a block that is not there"),
    pytest.param({"context_lens": torch.tensor([6, 9])}, ValueError, id="more tokens than the table has room for"),
    pytest.param({"context_lens": torch.tensor([6, -1])}, ValueError, id="a negative length"),
    pytest.param({"context_lens": torch.tensor([6])}, ValueError, id="one length for two tables"),
    pytest.param({"context_lens": torch.tensor([6, 3]).short()}, TypeError, id="lengths in int16"),
    pytest.param({"scale": "1"}, TypeError, id="a scale that is text"),
    pytest.param({"softcap": 0.0}, ValueError, id="softcap 0"),
    pytest.param({"sliding_window": 0}, ValueError, id="a window of 0"),
    pytest.param({"sliding_window": 2.5}, TypeError, id="a window of 2.5"),
    pytest.param({"alibi_slopes": torch.randn(2)}, ValueError, id="slopes for 2 of 4 query heads"),
    pytest.param({"alibi_slopes": torch.tensor([1, 2, 3, 4])}, TypeError, id="slopes that are ints"),
    pytest.param({"k_scale": torch.ones(4)}, ValueError, id="a scale for each query head"),
    pytest.param({"v_scale": [1.0, 2.0]}, TypeError, id="scales in a list"),
    pytest.param({"backend": "cpu"}, ValueError, id="an unknown backend"),
]


@pytest.mark.parametrize(("changes", "error"), [*ATTENTION_REFUSES, ({"num_splits": 0}, ValueError)])
def test_decode_refuses(changes, error):
    with pytest.raises(error):
        kernels.paged_decode_attention(**decoded(**changes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        *ATTENTION_REFUSES,
        pytest.param({"query_start_loc": torch.tensor([0, 4, 8])}, ValueError, id="more queries than there are"),
        pytest.param({"query_start_loc": torch.tensor([1, 4, 7])}, ValueError, id="not from 0"),
        pytest.param({"query_start_loc": torch.tensor([0, 8, 7])}, ValueError, id="falling"),
        pytest.param({"query_start_loc": torch.tensor([0, 3, 7])}, ValueError, id="4 queries of 3 tokens"),
        pytest.param({"query_start_loc": torch.tensor([0, 7])}, ValueError, id="too few"),
        pytest.param({"query_start_loc": torch.tensor([0.0, 4, 7])}, TypeError, id="floats"),
    ],
)
def test_prefill_refuses(changes, error):
    with pytest.raises(error):
        kernels.paged_prefill_attention(**prefilled(**changes))


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "oracle"])
def test_a_cache_may_be_a_slice_of_a_wider_tensor(options):
    """Keys and values in one tensor, `[num_blocks, 2, block_size, H_kv, d]`, are read where they lie."""
    pytest.importorskip("triton")
    both = torch.randn(BLOCKS, 2, SIZE, HEADS, DIM)
    k_cache, v_cache = both[:, 0], both[:, 1]
    packed = {"k_cache": k_cache.contiguous(), "v_cache": v_cache.contiguous()}
    for attend, given in (
        (kernels.paged_decode_attention, decoded(k_cache=k_cache, v_cache=v_cache)),
        (kernels.paged_prefill_attention, prefilled(k_cache=k_cache, v_cache=v_cache)),
    ):
        for backend in ("torch", "triton"):
            got = attend(**given, **options, backend=backend)
            torch.testing.assert_close(got, attend(**(given | packed), **options, backend="torch"))
    for backend in ("torch", "triton"):
        table = torch.tensor([4, 2, 99])
        assert kernels.gather_kv(v_cache, table, 7, backend=backend).equal(
            kernels.gather_kv(packed["v_cache"], table, 7)
        )
    with pytest.raises(ValueError, match="contiguous"):
        kernels.store_kv(**stored(k_cache=k_cache, v_cache=v_cache), backend="torch")
    given = stored(k_cache=k_cache, v_cache=v_cache)
    kernels.store_kv(**given, backend="triton")
    assert k_cache.flatten(0, 1)[4].equal(given["k"][0])
    assert v_cache.flatten(0, 1)[0].equal(given["v"][2])


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 0.5])], ids=str)
def test_one_scale_for_all_heads_may_be_a_tensor(scale):
    pytest.importorskip("triton")
    given = decoded()
    expected = kernels.paged_decode_attention(**given, k_scale=0.5, v_scale=0.25)
    for backend in ("torch", "triton"):
        got = kernels.paged_decode_attention(**given, k_scale=scale, v_scale=scale / 2, backend=backend)
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_a_learners_file_is_never_passed_over_for_a_compiled_kernel(tmp_path):
    """Where a lab's file stands in for `plain`, a CPU runs it: it is what is being graded, or served."""
    file = tmp_path / "plain.py"
    file.write_text("def paged_decode_attention(q, *_, **__):\n    return q + 1\n")
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from minicache_course import finder\n"
        f"finder.install({{'minicache.kernels.plain': Path({str(file)!r})}})\n"
        "from minicache import kernels\n"
        "q, cache = torch.zeros(1, 2, 8), torch.zeros(1, 4, 2, 8)\n"
        "out = kernels.paged_decode_attention(q, cache, cache, torch.tensor([[0]]), torch.tensor([3]))\n"
        "print(out.mean().item())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "1.0"
