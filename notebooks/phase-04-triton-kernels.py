# %% [markdown]
# # Phase 4: what the programs do
#
# Which rows does each program of a kernel load, what does it remember from tile to tile, and how many bytes does it ask
# for? No clock here: in the interpreter times mean nothing. Rows, numbers and bytes do.
#
# Set `MINE = True` in the first cell to run everything on your own files in `labs/phase-04-triton-kernels/`, then restart
# the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

import os

os.environ["TRITON_INTERPRET"] = (
    "1"  # before triton is imported; with a GPU too, since only the interpreter is traced
)

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(4)))

from minicache.errors import MemoryAccessError
from minicache.kernels import (
    gather_kv,
    paged_decode_attention,
    paged_prefill_attention,
    runtime,
    store_kv,
)
from minicache.kernels.tracer import trace, unused_rows

print("Triton", runtime.describe())
print("The kernels are", "yours." if MINE else "the reference's.")

# %%
import math

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from matplotlib.colors import ListedColormap

from minicache.palette import color

torch.set_num_threads(1)
torch.manual_seed(0)


def check(answer, right):
    """Compare an answer with the right one, if there is one to compare."""
    if answer is None:
        print("No answer yet: write it in the cell above, then run that cell and this one.")
        return
    assert answer == right, f"{answer} is not it"
    print("Right.")


def loaded_rows(log, tensor, program=None):
    """The first two indices of what was loaded from a cache, one set of (block, offset) for each load."""
    return [
        {tuple(row) for row in access.indices[~access.masked][:, :2].tolist()}
        for access in log.accesses
        if access.tensor == tensor and access.kind == "load" and program in (None, access.program)
    ]


# %% [markdown]
# ## 1. Programs, lanes, masks
#
# Ten numbers doubled, four at a time. The tracer notes each load and each store.


# %%
@triton.jit
def double_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, 2 * x, mask=inside)


x = torch.arange(10.0)
doubled = torch.empty_like(x)
with trace(x=x) as log:
    double_kernel[(triton.cdiv(10, 4),)](x, doubled, 10, TILE=4)
print(doubled)
print(log.draw("x"))

# %% [markdown]
# **Question 1.** With 20 numbers and `TILE=8`: how many programs, and how many of their lanes are masked?

# %%
num_programs = None
num_masked_lanes = None

# %%
with trace() as log:
    double_kernel[(triton.cdiv(20, 8),)](torch.ones(20), torch.empty(20), 20, TILE=8)
loads = [access for access in log.accesses if access.kind == "load"]
check(num_programs, len(loads))
check(num_masked_lanes, sum(int(access.masked.sum()) for access in loads))

# %% [markdown]
# The same kernel without the mask on its load. On a GPU this reads somebody else's numbers.


# %%
@triton.jit
def careless_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, 2 * x, mask=offsets < n)


try:
    with trace(x=x):
        careless_kernel[(3,)](x, doubled, 10, TILE=4)
except MemoryAccessError as error:
    print(error)

# %% [markdown]
# And the interpreter's worst trap: arithmetic in bfloat16 is wrong, without an error. Upcast right after the load.


# %%
@triton.jit
def sum_kernel(x_ptr, out_ptr, UPCAST: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    if UPCAST:
        x = x.to(tl.float32)
    tl.store(out_ptr, tl.sum(x, 0).to(tl.float32))


for upcast in (False, True):
    total = torch.zeros(1)
    sum_kernel[(1,)](torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16), total, UPCAST=upcast)
    print(
        f"1 + 2 + 3 + 4 in bfloat16, {'upcast first' if upcast else 'as it is':12}: {total.item():g}"
    )

# %% [markdown]
# ## 2. Store: rows into slots
#
# Four rows go to the slots 7, 12, 17 and nowhere, in a cache of six blocks of four.

# %%
k_cache, v_cache = torch.zeros(2, 6, 4, 2, 8)
rows = torch.arange(64.0).reshape(4, 2, 8)
with trace(k_cache=k_cache) as log:
    store_kv(rows, rows, k_cache, v_cache, torch.tensor([7, 12, 17, -1]), backend="triton")
print(log.draw("k_cache", "store"))

# %% [markdown]
# **Question 2.** Blocks of 16, block table (5, 1, 3). Into which slot goes the token at position 37?

# %%
slot_of_37 = None

# %%
block_table = torch.tensor([5, 1, 3])
numbers = torch.arange(6 * 16.0).reshape(6, 16, 1, 1)  # each slot holds its own number
check(slot_of_37, int(gather_kv(numbers, block_table, 38, backend="triton")[37].item()))

# %% [markdown]
# ## 3. Gather: two loads, one after the other
#
# 130 tokens in blocks of 16, in tiles of 64. Each line is a program, each column a row of the cache; blue ones are loaded.

# %% alt="Three lines over the 160 rows of ten blocks. The first program loads four whole blocks, the second four others, the third the first two rows of one more block; no block is loaded twice."
cache, table = torch.zeros(10, 16, 1, 8), torch.tensor([5, 1, 8, 3, 0, 9, 2, 7, 4])
with trace(cache=cache, block_table=table) as log:
    gather_kv(cache, table, 130, backend="triton")

programs = loaded_rows(log, "cache")
picture = torch.zeros(len(programs), 160)
for line, found in enumerate(programs):
    for block, offset in found:
        picture[line, block * 16 + offset] = 1
two_colours = ListedColormap([color("free"), color("generated")])
_, ax = plt.subplots(figsize=(7.2, 2.0), layout="constrained")
ax.imshow(picture, aspect="auto", cmap=two_colours, interpolation="nearest")
ax.set(
    xlabel="row of the cache (16 a block)",
    ylabel="program",
    yticks=range(len(programs)),
    xticks=range(0, 161, 16),
)
plt.show()
print("rows loaded by each program:", [int(line.sum()) for line in picture])

# %% [markdown]
# **Question 3.** Llama-3-8B has 8 KV heads of 128 numbers. Gathering 4,096 tokens of one layer in 16 bits, keys and values, and then
# attending to the gathered copy: how many bytes are read or written? (Reading through the table would be 16,777,216.)

# %%
bytes_with_gather = None

# %%
rows_of_one_layer = 2 * 4096 * 8 * 128 * 2
check(bytes_with_gather, 3 * rows_of_one_layer)  # read, written, read again

# %% [markdown]
# ## 4. The softmax in one pass
#
# Five rows with scores 0, ln 2, ln 4, 0, ln 8 and values 16, 0, 4, 16, 2. Their attention is 64 / 16 = 4. Tile by tile:


# %%
scores = [0.0, math.log(2), math.log(4), 0.0, math.log(8)]
values = [16.0, 0.0, 4.0, 16.0, 2.0]


def online(tile, *, rescaling=True, show=False):
    """Attention over the five rows, `tile` of them at a time."""
    m, total, acc = -math.inf, 0.0, 0.0
    for start in range(0, 5, tile):
        x, v = scores[start : start + tile], values[start : start + tile]
        new_m = max(m, *x)
        alpha = math.exp(m - new_m) if rescaling else 1.0
        p = [math.exp(score - new_m) for score in x]
        total = alpha * total + sum(p)
        acc = alpha * acc + sum(weight * value for weight, value in zip(p, v, strict=True))
        m = new_m
        if show:
            print(
                f"after rows {start} … {start + len(x) - 1}: m = ln {math.exp(m):g}, l = {total:g}, acc = {acc:g}"
            )
    return acc / total


print(f"result: {online(2, show=True):g}")

# %% alt="The result against rows in a tile, 1 to 5: with the rescale it is 4 for every tile size; without it, it is 6.1, 4.8, 4.2, 4.7 and, with all five rows in one tile, 4."
tiles = range(1, 6)
_, ax = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
ax.plot(tiles, [online(t) for t in tiles], "o-", color=color("generated"), label="with the rescale")
ax.plot(
    tiles,
    [online(t, rescaling=False) for t in tiles],
    "s--",
    color=color("wasted"),
    label="without",
)
ax.set(xlabel="rows in a tile", ylabel="result", xticks=list(tiles))
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()
print("without:", [round(online(t, rescaling=False), 3) for t in tiles])

# %% [markdown]
# Without the rescale every tile size gives another number, all of them plausible. Now the kernel, with the same five rows in blocks
# of two that lie in any order, and NaN in the row that nobody uses.

# %%
k_cache, v_cache = torch.zeros(2, 3, 2, 1, 4)
for position in range(5):
    block = [2, 0, 1][position // 2]
    k_cache[block, position % 2, 0, 0] = scores[position]
    v_cache[block, position % 2, 0, 0] = values[position]
k_cache[1, 1] = v_cache[1, 1] = math.nan
q = torch.tensor([[[2.0, 0, 0, 0]]])
tables, lengths = torch.tensor([[2, 0, 1]]), torch.tensor([5])
five_rows = (q, k_cache, v_cache, tables, lengths)

with trace(k_cache=k_cache, forbid={"k_cache": unused_rows(k_cache, tables, lengths)}) as log:
    print(paged_decode_attention(*five_rows, num_splits=1, backend="triton")[0, 0, 0])
print(log.draw("k_cache"))

# %% [markdown]
# **Question 4.** With ALiBi and the slope ln 2, a key that is n positions before the query counts 1/2ⁿ of what it did. What is the result?
# Exponentials and their sum can be worked out by hand; round to four digits after the point.

# %%
with_alibi = None

# %%
slope = torch.tensor([math.log(2)])
got = paged_decode_attention(*five_rows, alibi_slopes=slope, num_splits=1, backend="triton")
check(with_alibi, round(got[0, 0, 0].item(), 4))

# %% [markdown]
# ## 5. Tiles over blocks
#
# 37 tokens in blocks of 8; a tile has 16 tokens when a row has 256 fp32 numbers. Each line is a tile.

# %% alt="Three lines over the 64 rows of eight blocks: tile 0 loads blocks 5 and 1, tile 1 blocks 6 and 3, tile 2 the first five rows of block 0."
k_cache = torch.randn(8, 8, 1, 256)
tables, lengths = torch.tensor([[5, 1, 6, 3, 0]]), torch.tensor([37])
with trace(k_cache=k_cache) as log:
    paged = (torch.randn(1, 4, 256), k_cache, k_cache.clone(), tables, lengths)
    paged_decode_attention(*paged, num_splits=1, backend="triton")

tiles = loaded_rows(log, "k_cache")
picture = torch.zeros(len(tiles), 64)
for line, found in enumerate(tiles):
    for block, offset in found:
        picture[line, block * 8 + offset] = 1
_, ax = plt.subplots(figsize=(7.2, 2.0), layout="constrained")
ax.imshow(picture, aspect="auto", cmap=two_colours, interpolation="nearest")
ax.set(
    xlabel="row of the cache (8 a block)",
    ylabel="tile",
    yticks=range(len(tiles)),
    xticks=range(0, 65, 8),
)
plt.show()
assert picture.sum() == 37, "each row once, and no other"

# %% [markdown]
# ## 6. Split-KV
#
# The same result, in splits: only the last bits differ.

# %%
long = (torch.randn(1, 2, 256), torch.randn(9, 8, 1, 256), torch.randn(9, 8, 1, 256))
tables, lengths = torch.randperm(9)[None], torch.tensor([70])
whole = paged_decode_attention(*long, tables, lengths, num_splits=1, backend="triton")
for num_splits in (2, 3, 8):
    cut = paged_decode_attention(*long, tables, lengths, num_splits=num_splits, backend="triton")
    print(f"{num_splits} splits: largest difference {(cut - whole).abs().max().item():.1e}")

# %% [markdown]
# **Question 5.** 70 tokens, 16 in a tile, 8 splits of whole tiles. How many of the splits have nothing to read?

# %%
num_empty_splits = None

# %%
with trace(k_cache=long[1]) as log:
    paged_decode_attention(*long, tables, lengths, num_splits=8, backend="triton")
check(
    num_empty_splits,
    8 - len({access.program for access in log.accesses if access.tensor == "k_cache"}),
)

# %% [markdown]
# ## 7. Prefill: three sequences in one launch
#
# A brings 6 new tokens after 31 cached ones, B one after 19, C a whole prompt of 18. Eight query heads to a KV head: four queries
# make a tile. How many keys does each tile load?

# %% alt="Bars for the eight tiles that have work: A's two load 35 and 37 keys, B's one loads 20, C's five load 4, 8, 12, 16 and 18: a staircase."
lengths, starts = torch.tensor([37, 20, 18]), torch.tensor([0, 6, 7, 25])
tables = torch.tensor([[5, 1, 6, 3, 0], [2, 7, 9, 0, 0], [8, 4, 2, 0, 0]])
cache = torch.randn(10, 8, 1, 256)
with trace(k_cache=cache) as log:
    paged_prefill_attention(
        torch.randn(25, 8, 256), cache, cache.clone(), tables, lengths, starts, backend="triton"
    )

keys = {}
for access in log.accesses:
    if access.tensor == "k_cache":
        found = {tuple(row) for row in access.indices[~access.masked][:, :2].tolist()}
        keys.setdefault(access.program[1], set()).update(found)
_, ax = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
ax.bar(list(keys), [len(found) for found in keys.values()], color=color("generated"))
ax.set(xlabel="tile of queries (0, 1: A; 2: B; 3 to 7: C)", ylabel="keys loaded", xticks=list(keys))
ax.grid(axis="y", alpha=0.3)
plt.show()
print({tile: len(found) for tile, found in keys.items()})

# %% [markdown]
# **Question 6.** How many programs were launched for it, with those that found nothing to do? 25 queries, 3 sequences, one KV head.

# %%
num_launched = None

# %%
launched = {access.program for access in log.accesses}
check(
    num_launched, len(launched)
)  # each looks up its sequence, so that even an idle one is in the log

# %% [markdown]
# ## 8. Precision
#
# Against the same attention in float64: the kernel, and PyTorch in the same dtype.

# %%
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    q = torch.randn(1, 4, 64).to(dtype)
    k_cache, v_cache = torch.randn(2, 4, 16, 1, 64).to(dtype)
    tables, lengths = torch.tensor([[2, 0, 3]]), torch.tensor([45])
    paged = (q, k_cache, v_cache, tables, lengths)
    exact = paged_decode_attention(
        *(t.double() for t in paged[:3]), tables, lengths, backend="torch"
    )
    errors = [
        (paged_decode_attention(*paged, **how).double() - exact).abs().max().item()
        for how in ({"backend": "triton", "num_splits": 1}, {"backend": "torch"})
    ]
    print(f"{dtype!s:15} kernel {errors[0]:.1e}   PyTorch {errors[1]:.1e}")

# %% [markdown]
# ## 9. One byte a number
#
# A row, what the kernel stores of it, and what is read back. The last number has no neighbour of its size: in int8 it takes the steps
# of the largest one, in e4m3 it has its own.

# %%
row = torch.tensor([[[0.5, -1.27, 0.3, 0.013]]])
tokens = torch.tensor([0])
for dtype in (torch.int8, torch.float8_e4m3fn):
    k_cache, v_cache = torch.zeros(2, 1, 1, 1, 4).to(dtype)
    scales = dict(zip(("k_scale", "v_scale"), torch.zeros(2, 1, 1, 1), strict=True))
    store_kv(row, row, k_cache, v_cache, tokens, **scales, backend="triton")
    numbers, scale = k_cache[0, 0, 0].float(), scales["k_scale"].item()
    back = [round(number, 4) for number in (numbers * scale).tolist()]
    print(f"{dtype!s:20} scale {scale:.6f}, numbers {numbers.tolist()}, read back {back}")

# %% [markdown]
# How large is the error, in parts of the numbers' size? 256 rows of 128 normal numbers, a scale for each row, rounded to integers of
# 2 to 8 bits and to e4m3; and the same rows with one number thirty times as large as the others are, which is left out of the error.

# %% alt="Error against bits, on a logarithmic axis: a straight line falls by half for each bit, to 0.6 percent at 8 bits. With one large number in a row the line starts at 1 and is ten times higher at 8 bits, near 7 percent. Two points at 8 bits for e4m3, both near 2.6 percent."
normal = torch.randn(256, 128)
with_one_large = normal.clone()
with_one_large[:, 0] = 30.0


def error(rows, rounded, largest):
    """Root mean square error over all numbers of a row but the first, in parts of their size."""
    scale = rows.abs().amax(1, keepdim=True) / largest
    back = rounded(rows / scale) * scale
    return ((back - rows)[:, 1:].square().mean() / rows[:, 1:].square().mean()).sqrt().item()


def to_e4m3(numbers):
    """The nearest number of e4m3, in fp32."""
    return numbers.to(torch.float8_e4m3fn).float()


bits = list(range(2, 9))
kinds = (
    ("normal numbers", normal, color("generated"), "o"),
    ("one is thirty times as large", with_one_large, color("wasted"), "s"),
)
_, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
for name, rows, shade, marker in kinds:
    errors = [error(rows, torch.round, 2 ** (b - 1) - 1) for b in bits]
    e4m3 = error(rows, to_e4m3, 448)
    ax.semilogy(bits, errors, marker + "-", color=shade, label=f"integers, {name}")
    ax.semilogy(
        [8],
        [e4m3],
        marker,
        color=shade,
        markerfacecolor="none",
        markersize=10,
        label=f"e4m3, {name}",
    )
    print(f"{name}: int8 {errors[-1]:.4f}, e4m3 {e4m3:.4f}")
ax.set(xlabel="bits a number", ylabel="error / size of the numbers")
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# **Question 7.** Llama-3-8B: 32 layers, 8 KV heads, d = 128. How many bytes does a token take in int8, with a scale in fp32 for each token
# and head, for its key and for its value?

# %%
bytes_a_token = None

# %%
k_cache, k_scale = (
    torch.zeros(1, 8, 128, dtype=torch.int8),
    torch.zeros(1, 8),
)  # a token's keys in one layer
check(bytes_a_token, 32 * 2 * (k_cache.nbytes + k_scale.nbytes))

# %% [markdown]
# ## 10. Bytes
#
# Decode waits for bytes, so that the bytes a kernel asks for are a prediction of its time. The ladder's rungs, from the naive kernel
# up, predict theirs by a formula; the tracer counts what they load and store. One sequence of 64 tokens, 4 query heads to a KV head.

# %% alt="Bars of bytes for five rungs of the ladder: token by token and block by block ask for about 134,000 bytes, the three rungs in which a group shares its rows for about 35,000, near a quarter."
import sys
from pathlib import Path

clones = [
    folder
    for folder in (Path.cwd(), *Path.cwd().parents)
    if (folder / "benchmarks" / "ladder.py").is_file()
]
if not clones:
    raise SystemExit(
        "This cell needs `benchmarks/`: run it in a clone of the repository. Question 8 does not need it."
    )
sys.path.insert(0, str(clones[0]))

from benchmarks.ladder import RUNGS, make_workload

work = make_workload(
    [64], num_heads=4, num_kv_heads=1, head_dim=64, dtype=torch.float32, device="cpu"
)


def count(run):
    """Bytes that a kernel's lanes loaded and stored, as the tracer saw them: all numbers here have four."""
    with trace() as log:
        run(work)
    return 4 * sum(int((~access.masked).sum()) for access in log.accesses)


rungs = RUNGS[:5]  # split-KV splits no sequence as short as this
counted = {rung.name: count(rung.run) for rung in rungs}
for rung in rungs:
    print(f"{rung.name:30} predicted {rung.nbytes(work):9,}   counted {counted[rung.name]:9,}")

_, ax = plt.subplots(figsize=(7.2, 2.8), layout="constrained")
ax.barh(list(counted), list(counted.values()), color=color("generated"))
ax.invert_yaxis()
ax.set(xlabel="bytes")
ax.grid(axis="x", alpha=0.3)
plt.show()

# %% [markdown]
# **Question 8.** With 8 query heads to a KV head instead of 4, by what factor would the first rungs read more rows than the others?

# %%
factor = None

# %%
check(factor, 8)  # each query head reads for itself

# %% [markdown]
# What a GPU should make of these bytes is on the page *The ladder*: predicted. What GPUs have made of them, `make gpu` finds out, and
# `notebooks/colab/gpu.ipynb` on a borrowed GPU:

# %%
import json

results = sorted((clones[0] / "benchmarks" / "results").glob("gpu-*.json"))
for path in results:
    about = json.loads(path.read_text())
    print(about["gpu"], about["dtype"])
    for row in about["summary"]:
        print(f"    {row['what']:45} {row['found']}")
if not results:
    print("not measured")
