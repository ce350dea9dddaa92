# %% [markdown]
# # Phase 0: the arithmetic at work
#
# Why does a GPU that can do 312 trillion operations a second generate fewer than 130 tokens a second for one user? And
# how many can it generate for many users? The picture below answers this for one model on one card; fifteen small
# functions computed it. By the end of this notebook you can explain where each line starts, where it bends, and where
# it becomes impossible.

# %% alt="Tokens per second against batch size, both doubling, for Llama-3-8B on an A100-80GB, one line per context length. All start near 120 tokens per second. With 128 tokens of context the line rises to 19,000 at a batch of 256 and is flat from there; with 16,384 tokens it flattens below 1,000."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(0, mine=MINE)

from minicache.arithmetic import arithmetic, specs


def step(model, card, context, batch):
    """Seconds of one decode step."""
    flops = arithmetic.step_flops(model, 1, context, batch)
    return arithmetic.step_seconds(card, flops, arithmetic.step_bytes(model, 1, context, batch))


batches = [2**exponent for exponent in range(10)]
rates = {
    f"{context:,} tokens of context": [
        batch / step(specs.LLAMA_3_8B, specs.A100_80GB, context, batch) for batch in batches
    ]
    for context in (128, 1024, 4096, 16_384)
}
nb.lines(batches, rates, "batch size", "tokens per second", doubling=True, yscale="log")

# %% [markdown]
# ## 1. How many bytes does a token take?
#
# The table has seven models and three dtypes of the cache. Weights are not in it.

# %%
MODELS = {
    "OPT-13B": specs.OPT_13B,
    "Llama-3-8B": specs.LLAMA_3_8B,
    "Llama-3-70B": specs.LLAMA_3_70B,
    "Qwen3-8B": specs.QWEN3_8B,
    "Qwen3-32B": specs.QWEN3_32B,
    "DeepSeek-V3": specs.DEEPSEEK_V3,
    "MiniGPT": specs.MINIGPT,
}
print(f"{'bytes per token':<16}{'float32':>12}{'bfloat16':>12}{'int8':>12}")
for name, model in MODELS.items():
    dtypes = ("float32", "bfloat16", "int8")
    sizes = [arithmetic.cache_bytes_per_token(model, dtype) for dtype in dtypes]
    print(f"{name:<16}" + "".join(f"{size:>12,}" for size in sizes))

# %% [markdown]
# **Question 1.** You load a model that is not in the table: 48 layers, 40 query heads, 8 KV heads of 128, with the
# cache in int8. How many of its tokens fit in one GiB? Work it out before you run the check.

# %%
tokens_in_a_gib = None

# %%
nb.check(
    tokens_in_a_gib, specs.GIB // arithmetic.kv_bytes_per_token(48, 8, 128, "int8"), within=0.02
)

# %% [markdown]
# ## 2. Which model fits on which card?
#
# The table shows how many sequences of 4,096 tokens fit at once, with weights and cache in 16 bits and a tenth of the
# memory reserved. A dash means that the weights do not fit.

# %%
CARDS = [specs.L4, specs.A100_40GB, specs.A100_80GB, specs.H100, specs.H200]


def sequences(model, card, length, dtype="bfloat16"):
    """Sequences of `length` tokens on `card` at once, or None if the weights do not fit."""
    try:
        capacity = arithmetic.cache_capacity_tokens(
            card.memory_bytes,
            arithmetic.weight_bytes(model.num_parameters, dtype),
            arithmetic.cache_bytes_per_token(model, dtype),
            reserved_bytes=card.memory_bytes // 10,
        )
    except ValueError:
        return None
    return arithmetic.max_concurrent_sequences(capacity, length)


print(f"{'':<14}" + "".join(f"{card.name:>12}" for card in CARDS))
for name, model in list(MODELS.items())[:5]:
    counts = [sequences(model, card, 4096) for card in CARDS]
    print(f"{name:<14}" + "".join(f"{'-' if count is None else count:>12}" for count in counts))

# %% [markdown]
# **Question 2.** You serve Llama-3-8B on an A100-80GB, first in bfloat16, then with weights *and* cache in int8. By
# what factor does the number of concurrent sequences grow? More than 2, or less? (Within 2 %.)

# %%
factor = None

# %%
in_int8 = sequences(specs.LLAMA_3_8B, specs.A100_80GB, 4096, "int8")
in_bfloat16 = sequences(specs.LLAMA_3_8B, specs.A100_80GB, 4096)
nb.check(factor, in_int8 / in_bfloat16, within=0.02)

# %% [markdown]
# ## 3. What does a batch cost, and what does it gain?
#
# This is the first picture again, now against the time of a step instead of the batch size: from one mark to the next,
# the batch doubles. A user waits for the time of a step (further left is better for the user); all users together get
# tokens per second (higher is better for the operator).

# %% alt="Tokens per second against milliseconds per step for Llama-3-8B on an A100-80GB, one line per context length. With 128 tokens of context the line rises steeply from 120 tokens per second: a batch of 128 takes 13 per cent longer than one of 1. With 16,384 tokens it bends over early: bigger batches cost time and earn little."
milliseconds = {
    context: [1e3 * batch / rate for batch, rate in zip(batches, line)]
    for context, line in rates.items()
}
axes = {"xscale": "log", "yscale": "log"}
nb.lines(milliseconds, rates, "milliseconds per step", "tokens per second", **axes)

# %% [markdown]
# Not every point of these lines is possible: 512 sequences with 16,384 tokens each would take a terabyte of cache. Part
# 2 shows how many sequences of 4,096 tokens fit.
#
# **Question 3.** At a context of 1,024, how much longer does a step take with 64 sequences than with one? (A factor,
# within 2 %. Both are memory-bound: count weights and caches.)

# %%
slowdown = None

# %%
one, many = (step(specs.LLAMA_3_8B, specs.A100_80GB, 1024, batch) for batch in (1, 64))
nb.check(slowdown, many / one, within=0.02)

# %% [markdown]
# ## 4. When does decode stop being memory-bound?
#
# The picture shows the break-even batch against the context length. Where a line ends, the answer has become "never".

# %% alt="Break-even batch against context length for Llama-3-70B on an L4, an A100-80GB, an H100 and an H200. All lines start at the card's ridge, between 153 and 403, rise slowly and then shoot up to end between 1,000 and 3,000 tokens of context."
contexts = sorted({round(2 ** (exponent / 8)) for exponent in range(96)})
cards = (specs.L4, specs.A100_80GB, specs.H100, specs.H200)
reached, break_even = {}, {}
for card in cards:
    points = [(c, arithmetic.break_even_batch(specs.LLAMA_3_70B, card, c)) for c in contexts]
    points = [(c, batch) for c, batch in points if batch is not None and batch < 10_000]
    reached[card.name], break_even[card.name] = zip(*points)
words = ("tokens of context", "break-even batch")
nb.lines(reached, break_even, *words, marks=False, legend="Llama-3-70B on", **axes)

# %% [markdown]
# **Question 4.** Grouped queries save memory. What else do they do? Give the break-even batch of Llama-3-70B on an H200
# at 512 tokens if it had a key and a value for each of its 64 query heads: a number, or 0 for "never".

# %%
without_groups = None

# %%
from dataclasses import replace

ungrouped = replace(specs.LLAMA_3_70B, num_kv_heads=64)
with_groups = arithmetic.break_even_batch(specs.LLAMA_3_70B, specs.H200, 512)
print("With its 8 KV heads:", with_groups)
batch = arithmetic.break_even_batch(ungrouped, specs.H200, 512) or 0
nb.check(without_groups, batch, within=0.02)

# %% [markdown]
# ## 5. Where is the roof of your own machine?
#
# The next cell makes two quick measurements: how fast a large array is copied (each byte is read and written), and how
# fast a matrix product is computed. Together they make an `Accelerator` like the cards. Run the cell twice: other
# programs use the memory too.

# %%
import numpy as np

big = np.ones(2**25, dtype=np.float32)  # 128 MiB: more than a cache holds
copy = np.empty_like(big)
square = np.ones((1024, 1024), dtype=np.float32)

work = {"copy": lambda: np.copyto(copy, big), "product": lambda: square @ square}
milliseconds = nb.fastest(work, repeats=5)
here = specs.Accelerator(
    "this machine",
    memory_bytes=16 * specs.GIB,
    bandwidth=1e3 * 2 * big.nbytes / milliseconds["copy"],
    peak_flops=1e3 * 2 * 1024**3 / milliseconds["product"],
)
ridge = arithmetic.ridge_point(here)
print(f"bandwidth {here.bandwidth / 1e9:.1f} GB/s, peak {here.peak_flops / 1e9:.0f} GFLOP/s")
print(f"ridge {ridge:.1f} FLOP/byte")

# %% [markdown]
# The next cell computes a step of MiniGPT on this machine, with one sequence of 100 tokens of context in float32:

# %%
flops = arithmetic.step_flops(specs.MINIGPT, 1, 100)
nbytes = arithmetic.step_bytes(specs.MINIGPT, 1, 100, dtype="float32")
print(f"{nbytes / 1e6:.2f} MB and {flops / 1e6:.2f} MFLOPs a token")
print(f"at best {1e6 * arithmetic.step_seconds(here, flops, nbytes):.0f} µs a token")
print("memory-bound:", arithmetic.is_memory_bound(here, flops / nbytes))

# %% [markdown]
# In phase 1 you will measure MiniGPT's actual time. It is longer than this result: a model this small spends its time
# on launching operations, not on executing them, and its weights may not even leave the processor's cache. A roofline
# shows what the hardware allows, not what a program reaches. The gap between the two is worth knowing.
#
# **Question 5.** How many sequences would have to decode together on *your* machine, with an empty context, for
# Llama-3-8B in float32 not to be memory-bound? Estimate it from the ridge above. (Within 5 %, or 1.)

# %%
batch_here = None

# %%
right = arithmetic.break_even_batch(specs.LLAMA_3_8B, here, 0, "float32")
nb.check(batch_here, right, within=max(0.05, 1 / right))

# %% [markdown]
# ## Your experiment: double one number of the card
#
# You may double one number of a card: its memory, its bandwidth or its peak. Which one gives the most tokens per
# second?
#
# The batch is as large as the memory allows, so memory helps too. Choose a model, a card and a context length, **write
# down which of the three bars will be the longest**, and run the cell. Then look for a context at which the order
# changes. Is there any at which the peak helps most?

# %% alt="Four bars of tokens per second for Llama-3-8B on an L4 with 1,024 tokens of context: as it is, 581; with twice the memory, 1,408; with twice the bandwidth, 1,161; with twice the peak, 581 again."
YOUR_MODEL, YOUR_CARD, YOUR_CONTEXT = "Llama-3-8B", specs.L4, 1024
YOUR_PREDICTION = "write it here"

model = MODELS[YOUR_MODEL]


def throughput(card):
    """Tokens per second with as many sequences as fit, and how many that are."""
    batch = sequences(model, card, YOUR_CONTEXT) or 0
    return batch / step(model, card, YOUR_CONTEXT, batch) if batch else 0, batch


bars = {"as it is": throughput(YOUR_CARD)}
for number in ("memory_bytes", "bandwidth", "peak_flops"):
    doubled = replace(YOUR_CARD, **{number: 2 * getattr(YOUR_CARD, number)})
    bars[f"twice the {number}"] = throughput(doubled)
nb.bars(
    {f"{name} (batch of {batch})": rate for name, (rate, batch) in bars.items()},
    f"tokens per second, {YOUR_MODEL} on {YOUR_CARD.name}, {YOUR_CONTEXT:,} tokens",
    roles=("free", "generated", "generated", "generated"),
)
print("You predicted:", YOUR_PREDICTION)

# %% [markdown]
# **What to look for.** Twice the memory multiplies the *batch* by more than two, because the weights take their share
# only once. But a larger batch only helps as long as reading the weights takes most of the step: the longer the
# context, the more of the step is spent on reading caches, and then only bandwidth helps. The peak matters if the batch
# is above the break-even batch of part 4.
