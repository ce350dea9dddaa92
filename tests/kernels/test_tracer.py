"""The tracer: what it records of small kernels, what it refuses, what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from minicache.errors import MemoryAccessError
from minicache.kernels import gather_kv, paged_decode_attention, store_kv

triton = pytest.importorskip("triton")
tl = triton.language

from minicache_course.kernels.tracer import Access, Forbidden, trace, unused_entries, unused_rows  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreter")


@triton.jit
def copy_kernel(x_ptr, out_ptr, length, stride, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + i * stride, mask=i < length, other=0.0)
    tl.store(out_ptr + i, x, mask=i < length)


@triton.jit
def without_other_kernel(x_ptr, out_ptr):
    i = tl.arange(0, 4)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < 2))


@triton.jit
def load_one(x_ptr, at):
    return tl.load(x_ptr + at)


@triton.jit
def nested_kernel(x_ptr, out_ptr, at):
    tl.store(out_ptr, load_one(x_ptr, at))


@triton.jit
def wide_kernel(x_ptr, out_ptr):
    x = tl.load(
        x_ptr + tl.arange(0, 4),  # one too many
        mask=tl.arange(0, 4) < 4,
        other=0.0,
    )
    tl.store(out_ptr + tl.arange(0, 4), x)


@triton.jit
def count_kernel(counter_ptr, at):
    tl.atomic_add(counter_ptr + at, 1)


@triton.jit
def raising_kernel(x_ptr):
    raise NotImplementedError("phase 4, task 1: Store; read the page")


def test_what_a_kernel_loads_and_stores() -> None:
    x, out = torch.arange(6.0), torch.zeros(6)
    with trace(x=x) as log:
        copy_kernel[(2,)](x, out, 6, 1, TILE=4)
    assert torch.equal(out, x)
    kinds = [(access.kernel, access.program, access.kind, access.tensor) for access in log.accesses]
    assert kinds == [
        ("copy_kernel", (program, 0, 0), *rest) for program in range(2) for rest in (("load", "x"), ("store", "out"))
    ]
    last = log.accesses[2]
    assert isinstance(last, Access)
    assert last.indices.tolist() == [[4], [5], [-1], [-1]]
    assert last.masked.tolist() == [False, False, True, True]
    assert log.rows("x") == {(0, 0, 0): [(0,), (1,), (2,), (3,)], (1, 0, 0): [(4,), (5,)]}


def test_indices_are_those_of_the_named_tensor_whatever_its_strides() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    with trace(table=table) as log:
        copy_kernel[(1,)](table[:, 2], torch.zeros(3), 3, 4, TILE=4)
    assert log.rows("table") == {(0, 0, 0): [(0, 2), (1, 2), (2, 2)]}
    column = table.T[1:]
    with trace(column=column) as log:
        copy_kernel[(1,)](column, torch.zeros(2), 2, 4, TILE=2)
    assert log.rows("column") == {(0, 0, 0): [(0, 0), (0, 1)]}


def test_an_argument_that_was_not_named_goes_by_the_kernels_name_for_it() -> None:
    with trace() as log:
        copy_kernel[(1,)](torch.zeros(3), torch.zeros(3), 3, 1, TILE=4)
    assert set(log.rows("out", "store")) == {(0, 0, 0)}
    with pytest.raises(KeyError, match="no kernel had a tensor 'y': there are x, out"):
        log.rows("y")


def test_a_load_past_the_end_is_told() -> None:
    x = torch.zeros(5, 4)
    with pytest.raises(MemoryAccessError) as error, trace(x=x):
        copy_kernel[(2,)](x, torch.zeros(8), 8, 3, TILE=4)
    assert str(error.value) == (
        "copy_kernel, program (1, 0, 0), loads x[5, 1], but x is [5, 4]: "
        "1 of 4 lanes are outside, and no lane is masked"
    )
    (note,) = error.value.__notes__
    assert note.startswith("at ")
    assert "test_tracer.py:" in note
    assert note.endswith("x = tl.load(x_ptr + i * stride, mask=i < length, other=0.0)")


def test_a_mask_that_leaves_too_much_on_is_told() -> None:
    with pytest.raises(MemoryAccessError, match=r"1 of the 6 lanes that the mask leaves on are outside"), trace():
        copy_kernel[(1,)](torch.zeros(5), torch.zeros(8), 6, 1, TILE=8)


def test_the_gaps_between_a_views_rows_are_outside() -> None:
    rows = torch.zeros(3, 8)[:, :4]
    with pytest.raises(MemoryAccessError, match=r"loads x\[0, 4\], but x is \[3, 4\]"), trace(x=rows):
        copy_kernel[(1,)](rows, torch.zeros(8), 5, 1, TILE=8)


@pytest.mark.parametrize("at", [-1, 7, 2**31 - 1, -(2**31)])
def test_a_pointer_may_stray_far_without_harm(at: int) -> None:
    with pytest.raises(MemoryAccessError, match=rf"nested_kernel, program \(0, 0, 0\), loads x\[{at}\]"), trace():
        nested_kernel[(1,)](torch.zeros(7), torch.zeros(1), at)


def test_a_pointer_may_stray_farther_than_any_tensor() -> None:
    with pytest.raises(MemoryAccessError, match="far outside every tensor"), trace():
        nested_kernel[(1,)](torch.zeros(7), torch.zeros(1), 2**60)


def test_the_line_is_that_of_the_innermost_function() -> None:
    with pytest.raises(MemoryAccessError) as error, trace():
        nested_kernel[(1,)](torch.zeros(7), torch.zeros(1), 9)
    at, caller = error.value.__notes__
    assert at.endswith("return tl.load(x_ptr + at)")
    assert caller.startswith("called at ")
    assert caller.endswith("tl.store(out_ptr, load_one(x_ptr, at))")


def test_a_statement_over_several_lines_is_told_whole() -> None:
    with pytest.raises(MemoryAccessError) as error, trace():
        wide_kernel[(1,)](torch.zeros(3), torch.zeros(4))
    assert error.value.__notes__[0].endswith("tl.load(x_ptr + tl.arange(0, 4), mask=tl.arange(0, 4) < 4, other=0.0)")


def test_atomics_are_watched() -> None:
    counter = torch.zeros(2, dtype=torch.int32)
    with trace(counter=counter) as log:
        count_kernel[(3,)](counter, 1)
    assert counter.tolist() == [0, 3]
    assert [access.kind for access in log.accesses] == ["atomic"] * 3
    with pytest.raises(MemoryAccessError, match=r"changes counter\[2\]"), trace(counter=counter):
        count_kernel[(1,)](counter, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_masked_lanes_without_other_are_nan(dtype: torch.dtype) -> None:
    out = torch.zeros(4, dtype=dtype)
    with trace():
        without_other_kernel[(1,)](torch.ones(4, dtype=dtype), out)
    assert out.isnan().tolist() == [False, False, True, True]


def test_masked_lanes_without_other_are_minus_one_in_integers() -> None:
    out = torch.zeros(4, dtype=torch.int64)
    with trace():
        without_other_kernel[(1,)](torch.ones(4, dtype=torch.int64), out)
    assert out.tolist() == [1, 1, -1, -1]


def test_forbidden_elements() -> None:
    x = torch.zeros(4, 2)
    forbidden = Forbidden(torch.tensor([False, False, True, False]), "a row of someone else's")
    with trace(x=x, forbid={"x": forbidden}):
        copy_kernel[(1,)](x, torch.zeros(4), 4, 1, TILE=4)
    with (
        pytest.raises(MemoryAccessError, match=r"loads x\[2, 0\], a row of someone else's"),
        trace(x=x, forbid={"x": forbidden}),
    ):
        copy_kernel[(1,)](x, torch.zeros(8), 8, 1, TILE=8)
    with pytest.raises(ValueError, match="forbid names y"), trace(x=x, forbid={"y": forbidden}):
        pass


def test_what_no_sequence_uses() -> None:
    tables, lengths = torch.tensor([[3, 1, 7], [2, 9, 9]]), torch.tensor([6, 4])
    rows = unused_rows(torch.zeros(4, 4, 2, 8), tables, lengths)
    assert rows.where.int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    entries = unused_entries(tables, lengths, 4)
    assert entries.where.tolist() == [[False, False, True], [False, True, True]]


def test_a_kernels_own_error_comes_through_as_it_is() -> None:
    with pytest.raises(NotImplementedError, match="phase 4, task 1"), trace():
        raising_kernel[(1,)](torch.zeros(1))


def test_traces_do_not_nest_and_leave_nothing_behind() -> None:
    from triton.runtime import interpreter

    def hooks() -> list[object]:
        builder, launcher = interpreter.interpreter_builder, interpreter.GridExecutor
        return [dict(vars(builder)), launcher.__call__, launcher._init_args_hst, interpreter._implicit_cvt]

    copy_kernel[(1,)](torch.zeros(4), torch.zeros(4), 4, 1, TILE=4)
    before = hooks()
    with trace():
        with pytest.raises(RuntimeError, match="another trace is active"), trace():
            pass
        assert hooks() != before
    assert hooks() == before
    with pytest.raises(MemoryAccessError), trace():
        nested_kernel[(1,)](torch.zeros(7), torch.zeros(1), 9)
    assert hooks() == before
    with trace():
        pass


def test_the_rows_of_a_cache() -> None:
    k = torch.randn(3, 2, 4)
    k_cache, v_cache = torch.zeros(4, 2, 2, 4), torch.zeros(4, 2, 2, 4)
    with trace(k_cache=k_cache, slot_mapping=None) as log:
        store_kv(k, k, k_cache, v_cache, torch.tensor([5, -1, 2]), backend="triton")
    assert log.rows("k_cache") == {(0, 0, 0): [(2, 1)], (2, 0, 0): [(1, 0)]}


def test_drawing() -> None:
    cache = torch.randn(4, 4, 1, 8)
    with trace(cache=cache) as log:
        gather_kv(cache, torch.tensor([2, 0]), 6, backend="triton")
    heading, drawn = log.draw("cache", "load").splitlines()
    assert heading == "cache [4, 4, 1, 8], loaded by gather_kernel: █ loaded  ░ masked  · neither"
    place, _, blocks = drawn.partition(") ")
    assert place == "program (0, 0, 0"
    assert blocks.replace("░", "·") == "██··│····│████│····"
    assert "0 kernel" not in log.draw("cache", "store")
    assert "stored by no kernel" in log.draw("cache", "store")


def test_attention_is_drawn_program_by_program() -> None:
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 8)
    tables, lengths = torch.tensor([[5, 1, 99], [2, 99, 99]], dtype=torch.int32), torch.tensor([6, 3])
    given = {"k_cache": k_cache, "block_tables": tables}
    with trace(**given, forbid={"k_cache": unused_rows(k_cache, tables, lengths)}) as log:
        paged_decode_attention(torch.randn(2, 4, 8), k_cache, v_cache, tables, lengths, num_splits=1, backend="triton")
    rows = {program[:2]: rows for program, rows in log.rows("k_cache").items()}
    first, second = [(5, 0), (5, 1), (5, 2), (5, 3), (1, 0), (1, 1)], [(2, 0), (2, 1), (2, 2)]
    assert rows == {(0, 0): first, (1, 0): first, (0, 1): second, (1, 1): second}
    entries = log.rows("block_tables")
    assert set(entries[0, 1, 0]) == {(1, 0)}
    assert max(map(len, log.draw("k_cache").splitlines())) <= 100


def test_a_launch_of_no_programs_is_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(ValueError, match="copy_kernel is launched with no programs"), trace():
        copy_kernel[(0,)](x, x, 4, 1, TILE=4)


LANES = 4


@triton.jit
def global_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, LANES), 1.0)


def test_a_kernel_that_reads_a_variable_of_the_module_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(NameError, match="global_kernel reads LANES"), trace():
        global_kernel[(1,)](x)
    assert x.sum() == 0


def test_only_some_programs() -> None:
    x, out = torch.randn(4096), torch.zeros(4096)
    with trace(only=[(1023, 0, 0), (1024, 0, 0), (2, 0, 0)], x=x) as log:
        copy_kernel[(1024,)](x, out, 4096, 1, TILE=4)
        copy_kernel[(3,)](x, out, 4096, 1, TILE=4)
    assert set(log.rows("x")) == {(1023, 0, 0), (2, 0, 0)}
    assert out.nonzero().flatten().tolist() == [8, 9, 10, 11, 4092, 4093, 4094, 4095]
