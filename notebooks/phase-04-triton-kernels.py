# %% [markdown]
# # Phase 4: what the programs do
#
# A sequence of 37 tokens lies in five scattered blocks of a cache. Which KV entries does a decode attention kernel load, and
# when? The plot below shows every slot that it touches, tile by tile. This notebook traces each kernel of the phase: slots,
# numbers and bytes. It measures no times, which mean nothing in the interpreter.

# %% alt="Three lines over the 64 slots of eight blocks: tile 0 loads blocks 5 and 1, tile 1 blocks 6 and 3, tile 2 the first five slots of block 0."
MINE = False  # True: your own files; then restart the kernel and run all cells

import os
from minicache_course import notebook as nb

os.environ["TRITON_INTERPRET"] = "1"  # with a GPU too: only the interpreter is traced
nb.begin(4, mine=MINE)

import torch
from minicache.kernels import paged_decode_attention
from minicache_course.kernels.tracer import trace

torch.manual_seed(0)


def rows_of(access, block_size):
    """The slots that one access touches, counted through all blocks."""
    found = access.indices[~access.masked][:, :2].tolist()
    return {block * block_size + offset for block, offset in found}


def loads_of(log, tensor):
    """Each load of a tensor."""
    return [each for each in log.accesses if each.tensor == tensor and each.kind == "load"]


k_cache = torch.randn(8, 8, 1, 256)  # blocks, slots of a block, KV heads, numbers of a head
tables, lengths = torch.tensor([[5, 1, 6, 3, 0]]), torch.tensor([37])
q = torch.randn(1, 4, 256)
with trace(k_cache=k_cache) as log:
    paged_decode_attention(
        q, k_cache, k_cache.clone(), tables, lengths, num_splits=1, backend="triton"
    )
tiles = [rows_of(load, block_size=8) for load in loads_of(log, "k_cache")]
nb.rows_touched(tiles, 64, 8, "tile")

# %% [markdown]
# ## 1. Programs, lanes, masks
#
# This kernel doubles ten numbers, four at a time. The tracer records each load and each store.


# %%
import triton
import triton.language as tl


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
nb.check(num_programs, len(loads))
nb.check(num_masked_lanes, sum(int(access.masked.sum()) for access in loads))

# %% [markdown]
# Now the same kernel runs without the mask on its load. On a GPU it would read other tensors' memory.


# %%
from minicache.errors import MemoryAccessError


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
# The interpreter's worst trap is bfloat16 arithmetic, which is silently wrong. Upcast to fp32 right after the load.


# %%
@triton.jit
def sum_kernel(x_ptr, out_ptr, UPCAST: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    if UPCAST:
        x = x.to(tl.float32)
    tl.store(out_ptr, tl.sum(x, 0).to(tl.float32))


for upcast in (False, True):
    total = torch.zeros(1)
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    sum_kernel[(1,)](numbers, total, UPCAST=upcast)
    name = "upcast first" if upcast else "as it is"
    print(f"1 + 2 + 3 + 4 in bfloat16, {name:12}: {total.item():g}")

# %% [markdown]
# ## 2. Store: keys into slots
#
# Four keys go to the slots 7, 12, 17 and −1 (nowhere), in a cache of six blocks of four.

# %%
from minicache.kernels import store_kv

k_cache, v_cache = torch.zeros(2, 6, 4, 2, 8)
rows = torch.arange(64.0).reshape(4, 2, 8)
with trace(k_cache=k_cache) as log:
    store_kv(rows, rows, k_cache, v_cache, torch.tensor([7, 12, 17, -1]), backend="triton")
print(log.draw("k_cache", "store"))

# %% [markdown]
# **Question 2.** Blocks have 16 slots, and the block table is (5, 1, 3). Which slot holds the token at position 37?

# %%
slot_of_37 = None

# %%
from minicache.kernels import gather_kv

block_table = torch.tensor([5, 1, 3])
numbers = torch.arange(6 * 16.0).reshape(6, 16, 1, 1)  # each slot holds its own number
gathered = gather_kv(numbers, block_table, 38, backend="triton")
nb.check(slot_of_37, int(gathered[37].item()))

# %% [markdown]
# ## 3. Gather: two dependent loads
#
# There are 130 tokens in blocks of 16, gathered in tiles of 64. Each line is a program, each column a slot of the
# cache; blue ones are loaded.

# %% alt="Three lines over the 160 slots of ten blocks. The first program loads four whole blocks, the second four others, the third the first two slots of one more block; no block is loaded twice."
cache, table = torch.zeros(10, 16, 1, 8), torch.tensor([5, 1, 8, 3, 0, 9, 2, 7, 4])
with trace(cache=cache, block_table=table) as log:
    gather_kv(cache, table, 130, backend="triton")

programs = [rows_of(load, block_size=16) for load in loads_of(log, "cache")]
nb.rows_touched(programs, 160, 16, "program")
print("slots loaded by each program:", [len(rows) for rows in programs])

# %% [markdown]
# **Question 3.** Llama-3-8B has 8 KV heads of 128 numbers. You gather 4,096 tokens of one layer in 16 bits, keys and values, and
# then attend to the copy. How many bytes are read or written? (Reading through the table would be 16,777,216.)

# %%
bytes_with_gather = None

# %%
rows_of_one_layer = 2 * 4096 * 8 * 128 * 2
nb.check(bytes_with_gather, 3 * rows_of_one_layer)  # read, written, read again

# %% [markdown]
# ## 4. The softmax in one pass
#
# Five tokens have the scores 0, ln 2, ln 4, 0, ln 8 and the values 16, 0, 4, 16, 2. Their attention output, 64 / 16 =
# 4, is computed tile by tile in the next cell:


# %%
import math

scores = [0.0, math.log(2), math.log(4), 0.0, math.log(8)]
values = [16.0, 0.0, 4.0, 16.0, 2.0]


def online(tile, *, rescaling=True, show=False):
    """Attention over the five tokens, `tile` of them at a time."""
    m, total, acc = -math.inf, 0.0, 0.0
    for start in range(0, 5, tile):
        x, v = scores[start : start + tile], values[start : start + tile]
        new_m = max(m, *x)
        alpha = math.exp(m - new_m) if rescaling else 1.0
        p = [math.exp(score - new_m) for score in x]
        total = alpha * total + sum(p)
        acc = alpha * acc + sum(weight * value for weight, value in zip(p, v))
        m = new_m
        if show:
            last = start + len(x) - 1
            print(f"tokens {start} … {last}: m = ln {math.exp(m):g}, l = {total:g}, acc = {acc:g}")
    return acc / total


print(f"result: {online(2, show=True):g}")

# %% alt="The result against tokens in a tile, 1 to 5: with the rescale it is 4 for every tile size; without it, it is 6.1, 4.8, 4.2, 4.7 and, with all five tokens in one tile, 4."
sizes = range(1, 6)
results = {
    "with the rescale": [online(size) for size in sizes],
    "without": [online(size, rescaling=False) for size in sizes],
}
look = {"roles": ("generated", "wasted"), "xticks": sizes}
nb.lines(sizes, results, "tokens in a tile", "result", **look)
print("without:", [round(result, 3) for result in results["without"]])

# %% [markdown]
# Without the rescale every tile size gives a different, plausible number. Now the kernel runs with the same five tokens
# in scattered blocks of two, and NaN in the unused slot.

# %%
from minicache_course.kernels.tracer import unused_rows

k_cache, v_cache = torch.zeros(2, 3, 2, 1, 4)
for position in range(5):
    block = [2, 0, 1][position // 2]
    k_cache[block, position % 2, 0, 0] = scores[position]
    v_cache[block, position % 2, 0, 0] = values[position]
k_cache[1, 1] = v_cache[1, 1] = math.nan
q = torch.tensor([[[2.0, 0, 0, 0]]])
tables, lengths = torch.tensor([[2, 0, 1]]), torch.tensor([5])
five_tokens = (q, k_cache, v_cache, tables, lengths)

unused = {"k_cache": unused_rows(k_cache, tables, lengths)}
with trace(k_cache=k_cache, forbid=unused) as log:
    print(paged_decode_attention(*five_tokens, num_splits=1, backend="triton")[0, 0, 0])
print(log.draw("k_cache"))

# %% [markdown]
# **Question 4.** With ALiBi and the slope ln 2, the weight of a key n positions before the query is multiplied by 1/2ⁿ. What
# is the result? Work out the exponentials and their sum by hand; round to four decimal places.

# %%
with_alibi = None

# %%
slope = torch.tensor([math.log(2)])
got = paged_decode_attention(*five_tokens, alibi_slopes=slope, num_splits=1, backend="triton")
nb.check(with_alibi, round(got[0, 0, 0].item(), 4))

# %% [markdown]
# ## 5. Tiles over blocks
#
# Here are the 37 tokens of the first plot again, in blocks of 8. With 256 fp32 numbers per key a tile has 16 tokens,
# and so covers two blocks. The third tile has five tokens left; its other lanes are masked.

# %%
print("slots loaded by each tile:", [len(rows) for rows in tiles])
assert sum(map(len, tiles)) == len(set().union(*tiles)) == 37, "each slot once, and no other"

# %% [markdown]
# ## 6. Split-KV
#
# Splits give the same result; only the last bits differ.

# %%
long = (torch.randn(1, 2, 256), torch.randn(9, 8, 1, 256), torch.randn(9, 8, 1, 256))
tables, lengths = torch.randperm(9)[None], torch.tensor([70])
whole = paged_decode_attention(*long, tables, lengths, num_splits=1, backend="triton")
for num_splits in (2, 3, 8):
    cut = paged_decode_attention(*long, tables, lengths, num_splits=num_splits, backend="triton")
    print(f"{num_splits} splits: largest difference {(cut - whole).abs().max().item():.1e}")

# %% [markdown]
# **Question 5.** There are 70 tokens, 16 in a tile, and 8 splits of whole tiles. How many of the splits are empty?

# %%
num_empty_splits = None

# %%
with trace(k_cache=long[1]) as log:
    paged_decode_attention(*long, tables, lengths, num_splits=8, backend="triton")
nb.check(num_empty_splits, 8 - len({load.program for load in loads_of(log, "k_cache")}))

# %% [markdown]
# ## 7. Prefill: three sequences in one launch
#
# Sequence A has 6 new tokens after 31 cached ones, B has one after 19, and C has a whole prompt of 18. With eight query
# heads per KV head, four queries make a tile. How many keys does each tile load?

# %% alt="Bars for the eight tiles with queries: A's two load 35 and 37 keys, B's one loads 20, C's five load 4, 8, 12, 16 and 18: a staircase."
from minicache.kernels import paged_prefill_attention

lengths, starts = torch.tensor([37, 20, 18]), torch.tensor([0, 6, 7, 25])
tables = torch.tensor([[5, 1, 6, 3, 0], [2, 7, 9, 0, 0], [8, 4, 2, 0, 0]])
q, cache = torch.randn(25, 8, 256), torch.randn(10, 8, 1, 256)
with trace(k_cache=cache) as log:
    paged_prefill_attention(q, cache, cache.clone(), tables, lengths, starts, backend="triton")

keys = {}
for load in loads_of(log, "k_cache"):
    keys.setdefault(load.program[1], set()).update(rows_of(load, block_size=8))
sequences = [name for name, num in zip("ABC", (2, 1, 5)) for _ in range(num)]
bars = {f"{tile}: {name}": len(keys[tile]) for tile, name in zip(sorted(keys), sequences)}
nb.bars(bars, "keys loaded", ylabel="tile of queries")

# %% [markdown]
# **Question 6.** How many programs were launched, including those with no queries? There are 25 queries, 3 sequences and one
# KV head.

# %%
num_launched = None

# %%
launched = {access.program for access in log.accesses}
nb.check(num_launched, len(launched))  # each looks up its sequence: even an idle one is in the log

# %% [markdown]
# ## 8. Precision
#
# Here are the errors of the kernel and of PyTorch in the same dtype, against the same attention in float64.

# %%
tables, lengths = torch.tensor([[2, 0, 3]]), torch.tensor([45])
ways = {"kernel": {"backend": "triton", "num_splits": 1}, "PyTorch": {"backend": "torch"}}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    q = torch.randn(1, 4, 64).to(dtype)
    tensors = q, *torch.randn(2, 4, 16, 1, 64).to(dtype)
    in_float64 = [tensor.double() for tensor in tensors]
    exact = paged_decode_attention(*in_float64, tables, lengths, backend="torch")
    for name, how in ways.items():
        found = paged_decode_attention(*tensors, tables, lengths, **how).double()
        print(f"{dtype!s:15} {name:8} {(found - exact).abs().max().item():.1e}")

# %% [markdown]
# ## 9. One byte per number
#
# Here are a vector, what the kernel stores of it, and what is read back. The last number is far smaller than the
# others: in int8 its step is set by the largest one, in e4m3 by its own magnitude.

# %%
row = torch.tensor([[[0.5, -1.27, 0.3, 0.013]]])
tokens = torch.tensor([0])
for dtype in (torch.int8, torch.float8_e4m3fn):
    k_cache, v_cache = torch.zeros(2, 1, 1, 1, 4).to(dtype)
    scales = dict(zip(("k_scale", "v_scale"), torch.zeros(2, 1, 1, 1)))
    store_kv(row, row, k_cache, v_cache, tokens, **scales, backend="triton")
    numbers, scale = k_cache[0, 0, 0].float(), scales["k_scale"].item()
    back = [round(number, 4) for number in (numbers * scale).tolist()]
    print(f"{dtype!s:20} scale {scale:.6f}, numbers {numbers.tolist()}")
    print(f"{'':20} read back {back}")

# %% [markdown]
# How large is the error, relative to the numbers? The next cell rounds 256 rows of 128 normally distributed numbers to
# integers of 2 to 8 bits and to e4m3, with a scale per row, and then the same rows with one outlier of thirty standard
# deviations, which the error leaves out.

# %%
normal = torch.randn(256, 128)
one_large = normal.clone()
one_large[:, 0] = 30.0


def error(rows, rounded, largest):
    """Root mean square error over all numbers of a row but the first, relative to their size."""
    scale = rows.abs().amax(1, keepdim=True) / largest
    back = rounded(rows / scale) * scale
    return ((back - rows)[:, 1:].square().mean() / rows[:, 1:].square().mean()).sqrt().item()


def to_e4m3(numbers):
    """The nearest number of e4m3, in fp32."""
    return numbers.to(torch.float8_e4m3fn).float()


# %% alt="Error against bits, on a logarithmic axis: a straight line falls by half for each bit, to 0.6 percent at 8 bits. With one large number in a row the line starts at 1 and is ten times higher at 8 bits, near 7 percent. Two flat lines for e4m3, both near 2.6 percent."
bits, errors = list(range(2, 9)), {}
for name, rows in (("normal", normal), ("one large", one_large)):
    errors[f"integers, {name}"] = [error(rows, torch.round, 2 ** (b - 1) - 1) for b in bits]
    errors[f"e4m3, {name}"] = [error(rows, to_e4m3, 448)] * len(bits)
    int8, e4m3 = (errors[f"{kind}, {name}"][-1] for kind in ("integers", "e4m3"))
    print(f"{name}: int8 {int8:.4f}, e4m3 {e4m3:.4f}")
nb.lines(
    bits, errors, "bits an integer", "error / size of the numbers", yscale="log", ylim=(0.005, 20)
)

# %% [markdown]
# **Question 7.** Llama-3-8B has 32 layers and 8 KV heads with d = 128. How many bytes does a token take in int8, with an fp32
# scale per token and head, for its key and for its value?

# %%
bytes_a_token = None

# %%
k_cache = torch.zeros(1, 8, 128, dtype=torch.int8)  # a token's keys in one layer
k_scale = torch.zeros(1, 8)
nb.check(bytes_a_token, 32 * 2 * (k_cache.nbytes + k_scale.nbytes))

# %% [markdown]
# ## 10. Weights of few bits
#
# Here are the bytes of an output's first group, what they are read as, and the loads of a linear layer of 40 outputs
# over 160 inputs, which are five groups: a program takes 32 outputs, and four groups in each iteration.

# %%
from minicache.kernels import linear
from minicache.kernels.group_quantize import dequantize_groups, quantize_groups

weight = torch.zeros(1, 32)
weight[0, :4] = torch.tensor([0.9, -0.6, 0.16, 0.03])
for dtype in ("int8", "int4"):
    small = quantize_groups(weight, dtype)
    back = [round(number, 4) for number in dequantize_groups(small)[0, :4].tolist()]
    print(f"{dtype}: bytes {small.numbers[0, :4].tolist()}, read back {back}")

small = quantize_groups(torch.randn(40, 160), "int4")
with trace(numbers=small.numbers) as log:
    linear(torch.randn(1, 160), small, backend="triton")
for load in loads_of(log, "numbers"):
    print(f"program {load.program[0]}: {int((~load.masked).sum())} bytes")

# %% [markdown]
# How many values a number may have decides the error, and so does how many weights share a scale: the more weights
# share one, the further the largest is from the others. The next cell rounds normally distributed weights, 512 to an
# output, between the smallest and the largest of each group.

# %% alt="Error against weights that share a scale, 8 to 512, both axes logarithmic: three lines, for 3, 4 and 8 bits, each a little higher from left to right. In four bits the error grows from 0.05 for groups of 8 to 0.12 for groups of 512."
weights = torch.randn(64, 512)
sizes = [8, 16, 32, 64, 128, 256, 512]


def error_of(bits, size):
    """Root mean square error of groups of that size, relative to the weights."""
    groups = weights.view(-1, size)
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    back = ((groups - low) / scale).round() * scale + low
    return ((back - groups).square().mean() / groups.square().mean()).sqrt().item()


by_size = {f"{bits} bits": [error_of(bits, size) for size in sizes] for bits in (3, 4, 8)}
for name, errors in by_size.items():
    print(f"{name}: {errors[0]:.4f} … {errors[-1]:.4f}")
labels = "weights that share a scale", "error / size of the weights"
nb.lines(sizes, by_size, *labels, doubling=True, yscale="log")

# %% [markdown]
# **Question 8.** A scale and a minimum have 16 bits each. How many bits does a weight take with four bits and groups of
# 16, all included?

# %%
bits_a_weight = None

# %%
nb.check(bits_a_weight, 4 + 32 / 16)

# %% [markdown]
# ## 11. Bytes
#
# Decode is memory-bound, so the bytes that a kernel requests predict its time. A formula predicts the bytes of each
# rung of the ladder; the tracer counts what each loads and stores. Here is one sequence of 64 tokens, with 4 query
# heads per KV head. The ladder is in `benchmarks/`, so this needs a clone of the repository.

# %%
import sys
from pathlib import Path

folders = (Path.cwd(), *Path.cwd().parents)
clone = next((each for each in folders if (each / "benchmarks" / "ladder.py").is_file()), None)
if clone:
    sys.path.insert(0, str(clone))
else:
    print("There is no benchmarks/ here: the next cell does nothing. The others do not need it.")


# %% alt="Bars of bytes for five rungs of the ladder: token by token and block by block request about 134,000 bytes each, the three rungs in which a group shares its KV entries about 35,000, near a quarter."
def count(run, work):
    """Bytes that a kernel's lanes loaded and stored, as traced: all numbers here have four."""
    with trace() as log:
        run(work)
    return 4 * sum(int((~access.masked).sum()) for access in log.accesses)


if clone:
    from benchmarks.ladder import RUNGS, make_workload

    shape = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
    work = make_workload([64], **shape, dtype=torch.float32, device="cpu")
    rungs = RUNGS[:5]  # split-KV splits no sequence as short as this
    counted = {rung.name: count(rung.run, work) for rung in rungs}
    for rung in rungs:
        predicted = rung.nbytes(work)
        print(f"{rung.name:30} predicted {predicted:9,}   counted {counted[rung.name]:9,}")
    nb.bars(counted, "bytes")

# %% [markdown]
# **Question 9.** With 8 query heads per KV head instead of 4, how many KV entries would the first two rungs read for
# each one that the others read?

# %%
factor = None

# %%
nb.check(factor, 8)  # each query head reads for itself

# %% [markdown]
# The page *The ladder* predicts the times of these kernels on a GPU. `make gpu` measures them, and
# `notebooks/colab/gpu.ipynb` does so on a borrowed GPU. The next cell prints what they have measured.

# %%
import json

results = sorted((clone / "benchmarks" / "results").glob("gpu-*.json")) if clone else []
for path in results:
    about = json.loads(path.read_text())
    print(about["gpu"], about["dtype"])
    for row in about["summary"]:
        print(f"    {row['what']:45} {row['found']}")
if not results:
    print("not measured")

# %% [markdown]
# ## Your experiment: how many splits?
#
# One long sequence keeps one program busy and leaves the rest of a GPU idle. Split-KV cuts it into `num_splits` parts of whole
# tiles, and the launch takes as long as its longest part. From how many splits on is nothing gained?
#
# Choose a length; a tile has 16 tokens. **Write down the smallest number of splits that makes the longest part as short as
# possible**, then run the cell. Is every larger number as good? Is there a number that is no better than a smaller one?

# %% alt="Keys loaded by the longest split against the number of splits from 1 to 16, for 200 tokens. It falls in steps from 200 to 16; tokens divided by splits, a smooth curve, starts with it and is never above it."
YOUR_NUM_TOKENS = 200
YOUR_PREDICTION = None

num_blocks = -(-YOUR_NUM_TOKENS // 8)
k_cache, q = torch.randn(num_blocks, 8, 1, 256), torch.randn(1, 2, 256)
tables, lengths = torch.randperm(num_blocks)[None], torch.tensor([YOUR_NUM_TOKENS])
splits, longest = range(1, 17), []
for num_splits in splits:
    with trace(k_cache=k_cache) as log:
        sequence = (k_cache, k_cache.clone(), tables, lengths)
        paged_decode_attention(q, *sequence, num_splits=num_splits, backend="triton")
    keys = {}
    for load in loads_of(log, "k_cache"):
        keys.setdefault(load.program, set()).update(rows_of(load, block_size=8))
    longest.append(max(map(len, keys.values())))
curves = {"the longest split": longest, "tokens / splits": [YOUR_NUM_TOKENS / n for n in splits]}
nb.lines(splits, curves, "num_splits", "keys loaded", ylim=(0, None))
best = splits[longest.index(min(longest))]
print(f"no shorter than with {best} splits; you predicted {YOUR_PREDICTION}")

# %% [markdown]
# **What to look for.** A split has whole tiles, so the longest has ⌈tiles / splits⌉ of them: with 13 tiles, 9 splits
# are no better than 7. The cost of each split does not show here: its partial result is written, read again and merged.
# A real launch also has other sequences to fill the GPU; `num_splits=None` leaves the choice to `choose_num_splits`.
