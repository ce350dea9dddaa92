# %% [markdown]
# # Phase 0: the arithmetic at work
#
# What can you find out with fifteen small functions? This is the bench on which to try them: which models fit where,
# what a batch costs and earns, and where the roof of your own machine is. Nothing here needs a GPU.
#
# Set `MINE = True` in the first cell to compute with your own `labs/phase-00-decode-arithmetic/arithmetic/arithmetic.py`, then
# restart the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    files = workspace.lab_files(workspace.course.phase(0))
    install({"minicache.arithmetic.arithmetic": files["minicache.arithmetic.arithmetic"]})

from minicache.arithmetic import arithmetic, specs

print("Computing with", "your file." if MINE else "the reference.")

# %%
import dataclasses
import time

import matplotlib.pyplot as plt
import numpy as np

from minicache.palette import color
from minicache.arithmetic.specs import GIB, Accelerator

STYLES = [("generated", "-", "o"), ("end", "--", "s"), ("shared", "-.", "^"), ("wasted", ":", "D")]


def axes(xlabel, ylabel):
    """Logarithmic axes with labels and a grid."""
    _, ax = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
    ax.grid(alpha=0.3)
    return ax


def check(answer, right, within=0.02):
    """Compare an answer with the computed one, if there is one to compare."""
    if answer is None:
        print("No answer yet: write it in the cell above, then run that cell and this one.")
        return
    direction = "high" if answer > right else "low"
    assert abs(answer - right) <= within * abs(right), f"{answer:,} is too {direction}"
    print("Right.")


# %% [markdown]
# ## 1. What does a token leave behind?
#
# Seven models, three dtypes of the cache. Weights are not in this table.

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
# **Question 1.** You load a model that the table does not have: 48 layers, 40 query heads, 8 KV heads of 128, and the
# engine stores its cache in int8. How many tokens of it take one GiB? Work it out before you run the check.

# %%
tokens_in_a_gib = None

# %%
check(tokens_in_a_gib, GIB // arithmetic.kv_bytes_per_token(48, 8, 128, "int8"))

# %% [markdown]
# ## 2. Who fits on which card?
#
# Sequences of 4,096 tokens that fit at once, weights and cache in 16 bits, a tenth of the memory held back. A dash: the
# weights do not even fit.

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
# **Question 2.** Llama-3-8B on an A100-80GB, first in bfloat16, then with weights *and* cache in int8. By what factor does
# the number of concurrent sequences grow? More than 2, or less? (Within 2 %.)

# %%
factor = None

# %%
in_int8 = sequences(specs.LLAMA_3_8B, specs.A100_80GB, 4096, "int8")
check(factor, in_int8 / sequences(specs.LLAMA_3_8B, specs.A100_80GB, 4096))

# %% [markdown]
# ## 3. What does a batch cost, and what does it earn?
#
# Decode of Llama-3-8B on an A100-80GB. Left to right the batch doubles. Each sequence waits for the time of a step
# (downwards is better for the user); all together produce tokens per second (upwards is better for the owner).

# %% alt="Tokens per second against seconds per step for Llama-3-8B on an A100-80GB, one line per context length. With 128 tokens of context the line rises steeply from 120 tokens per second: a batch of 128 takes an eighth longer than one of 1. With 16,384 tokens it bends over early: bigger batches cost time and earn little."
def step(model, card, context, batch):
    """Seconds of one decode step."""
    flops = arithmetic.step_flops(model, 1, context, batch)
    return arithmetic.step_seconds(card, flops, arithmetic.step_bytes(model, 1, context, batch))


batches = [2**exponent for exponent in range(10)]
ax = axes("milliseconds per step", "tokens per second, whole batch")
for context, (role, dash, marker) in zip((128, 1024, 4096, 16_384), STYLES, strict=True):
    times = [step(specs.LLAMA_3_8B, specs.A100_80GB, context, batch) for batch in batches]
    rates = [batch / seconds for batch, seconds in zip(batches, times, strict=True)]
    milliseconds = [1000 * seconds for seconds in times]
    ax.plot(milliseconds, rates, dash, marker=marker, color=color(role), label=f"{context:,} tokens")
ax.legend(title="context")
plt.show()

# %% [markdown]
# Not every point of these lines exists: 512 sequences with 16,384 tokens each would take a terabyte of cache. Which ones do
# is the question of part 2.
#
# **Question 3.** At a context of 1,024, how much longer does a step take with 64 sequences than with one? (A factor,
# within 2 %. Bytes decide in both cases: count weights and caches.)

# %%
slowdown = None

# %%
one, many = (step(specs.LLAMA_3_8B, specs.A100_80GB, 1024, batch) for batch in (1, 64))
check(slowdown, many / one)

# %% [markdown]
# ## 4. When does decode stop waiting for the memory?
#
# The break-even batch against the context length. A line that ends has become "never".

# %% alt="Break-even batch against context length for Llama-3-70B on an L4, an A100-80GB, an H100 and an H200. All lines start at the card's ridge, between 153 and 403, rise slowly and then shoot up to end between 1,000 and 3,000 tokens of context."
contexts = sorted({round(2 ** (exponent / 8)) for exponent in range(0, 96)})
ax = axes("tokens of context", "break-even batch")
cards = (specs.L4, specs.A100_80GB, specs.H100, specs.H200)
for card, (role, dash, _) in zip(cards, STYLES, strict=True):
    points = [(c, arithmetic.break_even_batch(specs.LLAMA_3_70B, card, c)) for c in contexts]
    points = [(context, batch) for context, batch in points if batch is not None and batch < 10_000]
    ax.plot(*zip(*points, strict=True), dash, color=color(role), label=card.name)
ax.legend(title="Llama-3-70B on")
plt.show()

# %% [markdown]
# **Question 4.** Grouped queries were invented to save memory. What do they do here? Give the break-even batch of
# Llama-3-70B on an H200 at 512 tokens if it had a key and a value for each of its 64 query heads: a number, or 0 for
# "never".

# %%
without_groups = None

# %%
ungrouped = dataclasses.replace(specs.LLAMA_3_70B, num_kv_heads=64)
with_groups = arithmetic.break_even_batch(specs.LLAMA_3_70B, specs.H200, 512)
print("With its 8 KV heads:", with_groups)
check(without_groups, arithmetic.break_even_batch(ungrouped, specs.H200, 512) or 0)

# %% [markdown]
# ## 5. Where is the roof of your own machine?
#
# Two measurements of a moment: how fast a large array is copied (each byte is read and written), and how fast a matrix
# product is computed. They make an `Accelerator` like the others. Run the cell twice: other programs use the memory too.

# %%
big = np.ones(2**25, dtype=np.float32)  # 128 MiB: more than a cache holds
copy = np.empty_like(big)
square = np.ones((1024, 1024), dtype=np.float32)


def best(work, times=5):
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


here = Accelerator(
    "this machine",
    memory_bytes=16 * GIB,
    bandwidth=2 * big.nbytes / best(lambda: np.copyto(copy, big)),
    peak_flops=2 * 1024**3 / best(lambda: square @ square),
)
ridge = arithmetic.ridge_point(here)
print(f"bandwidth {here.bandwidth / 1e9:.1f} GB/s, peak {here.peak_flops / 1e9:.0f} GFLOP/s")
print(f"ridge {ridge:.1f} FLOP/byte")

# %% [markdown]
# MiniGPT on this machine, one sequence, 100 tokens of context, float32:

# %%
flops = arithmetic.step_flops(specs.MINIGPT, 1, 100)
nbytes = arithmetic.step_bytes(specs.MINIGPT, 1, 100, dtype="float32")
print(f"{nbytes / 1e6:.2f} MB and {flops / 1e6:.2f} MFLOPs a token")
print(f"at best {1e6 * arithmetic.step_seconds(here, flops, nbytes):.0f} µs a token")
print("memory-bound:", arithmetic.is_memory_bound(here, flops / nbytes))

# %% [markdown]
# In phase 1 you will measure what MiniGPT really takes. It is far more: a model this small spends its time on calling
# operations, not on doing them, and its weights may not even leave the processor's cache. A roofline says what the
# hardware allows, not what a program reaches. The distance between the two is worth knowing.
#
# **Question 5.** How many sequences would have to decode together on *your* machine, with an empty context, so that
# Llama-3-8B in float32 is no longer memory-bound? Estimate it from the ridge above. (Within 5 %, or 1.)

# %%
batch_here = None

# %%
right = arithmetic.break_even_batch(specs.LLAMA_3_8B, here, 0, "float32")
check(batch_here, right, within=max(0.05, 1 / right))
