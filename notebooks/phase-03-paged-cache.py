# %% [markdown]
# # Phase 3: the paged cache at work
#
# How much memory do block tables save, what does the model notice, and what does reading through a table cost on this
# machine? Here you watch them work and put the clock on them.
#
# Set `MINE = True` in the first cell to run everything on your own files in `labs/phase-03-paged-cache/`, then restart
# the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(3)))

from minicache import kernels
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for
from minicache.cache.paged import PagedKVCache, PagedStorage, RaggedStep

print("Blocks, kernels and paged cache are", "yours." if MINE else "the reference's.")

# %%
import random
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from minicache.cache.attention import causal_attention
from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache.palette import color

torch.set_num_threads(1)  # a second thread makes steps this small slower, and their times noisy
torch.manual_seed(0)
tokenizer = Tokenizer()
model = load_minigpt()
config = model.config


def axes(xlabel, ylabel):
    """Axes with labels and a grid."""
    _, ax = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.3)
    return ax


def check(answer, right):
    """Compare an answer with the right one, if there is one to compare."""
    if answer is None:
        print("No answer yet: write it in the cell above, then run that cell and this one.")
        return
    if isinstance(right, int):
        direction = "high" if answer > right else "low"
        assert answer == right, f"{answer:,} is too {direction}"
    assert answer == right, f"{answer} is not right"
    print("Right.")


def fastest(contestants, repeats):
    """Milliseconds of each function, the minimum of many turns, taken in turns so that a slow moment hits all."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


# %% [markdown]
# ## 1. The model does not notice
#
# The same prompt through a dense cache and through a paged one. The tokens are the same; look at the bytes.

# %% alt="KiB against tokens. The dense cache has 1,024 KiB reserved from the first token on; the blocks of the paged cache rise in steps of 32 KiB close above the bytes in use."
dense = KVCache(config.num_layers, 1, config.num_kv_heads, 512, config.head_dim)
paged = PagedKVCache(config.num_layers, 1, config.num_kv_heads, 512, config.head_dim, block_size=16)
prompt = torch.tensor([tokenizer.encode("Yesterday I")])

expected = [int(token) for token in decode(model, prompt, 120, cache=dense)]
tokens, used, allocated = [], [], []
for token in decode(model, prompt, 120, cache=paged):
    tokens.append(int(token))
    used.append(paged.nbytes_used / 1024)
    allocated.append(paged.nbytes_allocated / 1024)
assert tokens == expected
print("The tokens are the same.")

ax = axes("tokens in the cache", "KiB")
num_tokens = range(2, 122)
ax.axhline(dense.nbytes / 1024, color=color("wasted"), linestyle="--", label="dense: reserved")
ax.step(num_tokens, allocated, where="post", color=color("end"), label="paged: blocks taken")
ax.plot(num_tokens, used, color=color("generated"), label="in use, either way")
ax.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# **Question 1.** With 121 tokens in the cache and blocks of 16, how many bytes are taken and empty? A row of MiniGPT is
# 2,048 bytes.

# %%
bytes_taken_and_empty = None

# %%
check(bytes_taken_and_empty, paged.nbytes_allocated - paged.nbytes_used)

# %% [markdown]
# ## 2. One pool, many sequences
#
# A memory of 512 blocks of 16 tokens, 8,192 in all. A sequence comes in when there is room for its prompt and a block to
# spare for everybody, and leaves at a length that nobody knew. Each step every sequence gets one token. If the pool is
# short, the youngest goes back to the queue (phase 6 does this properly).

# %% alt="Rows against steps, stacked: rows with a token fill most of the 8,192; rows taken and empty are a thin band of a few per cent on top of them; a little more is free."
BLOCK_SIZE, NUM_BLOCKS = 16, 512
rng = random.Random(0)
pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
waiting = [(rng.randint(10, 200), rng.randint(20, 600)) for _ in range(400)]  # prompt, new tokens
running, with_token, empty, batch, evicted = [], [], [], [], 0

for _ in range(600):
    while waiting and blocks_for(waiting[0][0], BLOCK_SIZE) + len(running) < pool.num_free:
        num_prompt, num_new = waiting.pop(0)
        table = BlockTable(pool)
        table.append(num_prompt)
        running.append((table, num_prompt, num_new))
    while sum(table.blocks_needed(1) for table, _, _ in running) > pool.num_free:
        table, num_prompt, num_new = running.pop()
        table.release()
        waiting.insert(0, (num_prompt, num_new))
        evicted += 1
    for table, _, _ in running:
        table.append(1)
    for table, num_prompt, num_new in running:
        if table.num_tokens == num_prompt + num_new:
            table.release()
    running = [each for each in running if each[0].num_tokens]
    tokens_now = sum(table.num_tokens for table, _, _ in running)
    with_token.append(tokens_now)
    empty.append(pool.num_used * BLOCK_SIZE - tokens_now)
    batch.append(len(running))
    assert empty[-1] <= len(running) * (BLOCK_SIZE - 1)  # the bound, at every step
pool.check()

rows = NUM_BLOCKS * BLOCK_SIZE
ax = axes("step", "rows")
ax.stackplot(
    range(len(empty)),
    with_token,
    empty,
    [rows - a - b for a, b in zip(with_token, empty, strict=True)],
    colors=[color("generated"), color("wasted"), color("free")],
    labels=["with a token", "taken and empty", "free"],
)
ax.set(xlim=(0, len(empty) - 1), ylim=(0, rows))
ax.legend(loc="lower right")
plt.show()
taken = sum(with_token) + sum(empty)
print(f"of the rows taken, {sum(with_token) / taken:.1%} hold a token, averaged over all steps")
print(f"{sum(batch) / len(batch):.1f} sequences run at once; dense, with 800 rows for each, it would be {rows // 800}")
print(f"{evicted} times a sequence had to give its blocks back")

# %% [markdown]
# **Question 2.** 20 sequences are running. How many rows can be taken and empty at most, in blocks of 16? And in blocks
# of 128?

# %%
at_most_with_16 = None
at_most_with_128 = None

# %%
check(at_most_with_16, 20 * (blocks_for(1, 16) * 16 - 1))
check(at_most_with_128, 20 * (blocks_for(1, 128) * 128 - 1))

# %% [markdown]
# ## 3. First in, first out
#
# What happens to the contents of a block after it has been freed? Here a pool of 64, some of them in use. Somebody
# frees a block; how many allocations later is it handed out again?

# %% alt="Allocations until a freed block is used again, against how many blocks are free: a straight line; the more blocks are free, the longer contents survive."
lifetimes = []
for num_free in range(1, 64):
    pool = BlockPool(64, 16)
    held = pool.allocate(64 - num_free)
    pool.free(held[:1])
    count = 1
    while pool.allocate(1) != held[:1]:
        count += 1
    lifetimes.append(count)

ax = axes("other blocks that are free", "allocations until it is used again")
ax.plot(range(1, 64), lifetimes, color=color("generated"), label="a line: first in, first out")
ax.plot(range(1, 64), [1] * 63, color=color("wasted"), linestyle="--", label="a stack: last in, first out")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# How fast is the pool? One block taken and given back, as a decode step does now and then:


# %%
def pairs(count=100_000):
    """Allocate and free one block, many times."""
    allocate, free = pool.allocate, pool.free
    for _ in range(count):
        free(allocate(1))


pool = BlockPool(10_000, 16)
milliseconds = fastest({"pairs": pairs}, repeats=3)["pairs"]
print(f"{100_000 / milliseconds / 1e3:.2f} million pairs of allocate and free in a second")

# %% [markdown]
# ## 4. The size of a block, as memory sees it
#
# The same 4,096 rows of one layer of Llama-3-8B (8 KV heads of 128, float32), gathered from blocks of 1 to 256 rows that
# lie in random order.

# %% alt="Milliseconds to gather 4,096 rows against block size from 1 to 256, the sizes on a logarithmic axis: the curve is nearly flat, with at most a small difference between blocks of one row and the rest."
NUM_ROWS = 4096
sizes = [2**power for power in range(9)]
contestants = {}
for size in sizes:
    cache = torch.randn(NUM_ROWS // size, size, 8, 128)
    block_table = torch.randperm(NUM_ROWS // size)
    contestants[size] = lambda cache=cache, table=block_table: kernels.gather_kv(cache, table, NUM_ROWS)
milliseconds = fastest(contestants, repeats=30)

ax = axes("block size, rows", "milliseconds")
ax.plot(sizes, [milliseconds[size] for size in sizes], "o-", color=color("generated"))
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, [str(size) for size in sizes])
ax.set_ylim(bottom=0)
plt.show()
print(f"1 row: {milliseconds[1]:.2f} ms   16 rows: {milliseconds[16]:.2f} ms   256 rows: {milliseconds[256]:.2f} ms")

# %% [markdown]
# One row of eight heads is 4 KiB already, a page of memory: enough for the copy to run at full pace. On a CPU it is not
# the reading that asks for larger blocks; it is the tables, and the work of filling them.
#
# **Question 3.** 64 sequences of 4,096 tokens: how many entries do their block tables have in all, with blocks of 1 and
# of 16?

# %%
entries_with_1 = None
entries_with_16 = None

# %%
check(entries_with_1, 64 * blocks_for(4096, 1))
check(entries_with_16, 64 * blocks_for(4096, 16))

# %% [markdown]
# ## 5. Ways to attend
#
# 32 sequences of 64 to 1,024 tokens, one new query each; 8 query heads, 2 KV heads, d = 64, blocks of 16. Four ways in
# one run: the same rows without paging, sequence by sequence; `paged_decode_attention`; block by block without any
# gather, with the partial results merged; and a padded gather with a mask.

# %% alt="Four bars of milliseconds. Contiguous rows and paged decode attention are the shortest, block by block takes longer, and the padded gather with a mask several times as long as the first two."
NUM_SEQUENCES, HEADS, KV_HEADS, HEAD_DIM = 32, 8, 2, 64
lengths = [rng.randint(64, 1024) for _ in range(NUM_SEQUENCES)]
pool = BlockPool(sum(blocks_for(length, 16) for length in lengths), 16)
order = pool.allocate(pool.num_blocks)
rng.shuffle(order)
pool.free(order)  # from now on the pool hands out blocks in random order, as after hours of use
tables = [BlockTable(pool) for _ in lengths]
for table, length in zip(tables, lengths, strict=True):
    table.append(length)

q = torch.randn(NUM_SEQUENCES, HEADS, HEAD_DIM)
k_cache, v_cache = torch.randn(2, pool.num_blocks, 16, KV_HEADS, HEAD_DIM)
width = max(len(table.block_ids) for table in tables)
block_tables = torch.tensor([table.block_ids + [0] * (width - len(table.block_ids)) for table in tables])
context_lens = torch.tensor(lengths)
contiguous = [
    [kernels.gather_kv(cache, row, length).transpose(0, 1)[None].contiguous() for cache in (k_cache, v_cache)]
    for row, length in zip(block_tables, lengths, strict=True)
]


def through_the_table():
    """The kernel of task 7."""
    return kernels.paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens)


def padded():
    """Gather everything, as long as the longest, and mask the padding."""
    k, v = (cache[block_tables].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    visible = torch.arange(k.shape[2]) < context_lens[:, None]
    rows = q.view(NUM_SEQUENCES, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible[:, None, None]).flatten(1, 2)


owner = torch.zeros(pool.num_blocks, dtype=torch.int64)  # of each block, and how many of its rows are tokens
held = torch.zeros(pool.num_blocks, dtype=torch.int64)
for i, table in enumerate(tables):
    owner[table.block_ids] = i
    held[table.block_ids] = 16
    held[table.block_ids[-1]] = table.num_tokens - 16 * (len(table.block_ids) - 1)


def by_block():
    """Each block on its own, where it lies; then each sequence's blocks are merged by their sums."""
    group = (KV_HEADS, HEADS // KV_HEADS)
    rows = q.view(NUM_SEQUENCES, *group, HEAD_DIM)[owner] / HEAD_DIM**0.5
    scores = torch.einsum("nkgd,nskd->nkgs", rows, k_cache)
    scores = scores.masked_fill((torch.arange(16) >= held[:, None])[:, None, None], float("-inf"))
    largest = torch.full((NUM_SEQUENCES, *group), float("-inf"))
    largest.scatter_reduce_(0, owner[:, None, None].expand(-1, *group), scores.amax(-1), "amax")
    weights = (scores - largest[owner][..., None]).exp()
    total = torch.zeros(NUM_SEQUENCES, *group).index_add_(0, owner, weights.sum(-1))
    summed = torch.einsum("nkgs,nskd->nkgd", weights, v_cache)
    out = torch.zeros(NUM_SEQUENCES, *group, HEAD_DIM).index_add_(0, owner, summed)
    return (out / total[..., None]).flatten(1, 2)


def without_paging():
    """The same rows side by side in memory."""
    return torch.cat([causal_attention(q[i][None, :, None], k, v)[:, :, 0] for i, (k, v) in enumerate(contiguous)])


ways = {
    "contiguous rows": without_paging,
    "through the table": through_the_table,
    "block by block": by_block,
    "padded, with a mask": padded,
}
for way in ways.values():
    torch.testing.assert_close(way(), without_paging())
milliseconds = fastest(ways, repeats=30)

ax = axes("milliseconds", "")
ax.barh(
    list(milliseconds), list(milliseconds.values()), color=[color(r) for r in ("free", "generated", "shared", "wasted")]
)
ax.bar_label(ax.containers[0], fmt="%.1f", padding=3)
ax.margins(x=0.12)
ax.invert_yaxis()
plt.show()

# %% [markdown]
# **Question 4.** The padded way gathers keys for how many rows, padding included? And how many of them are tokens?
# `lengths` and `width` are above.

# %%
rows_gathered = None
rows_of_tokens = None

# %%
check(rows_gathered, NUM_SEQUENCES * width * 16)
check(rows_of_tokens, sum(lengths))

# %% [markdown]
# ## 6. The ragged step
#
# Three texts of unlike length, one model, one pass a step: first three prefills, then three decodes. The tokens must be
# those that each text gets alone.

# %%
texts = ["Yesterday I", "Tomorrow she will cook fish .", "They"]
pool = BlockPool(64, 16)
storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
tables = [BlockTable(pool) for _ in texts]
new = [tokenizer.encode(text) for text in texts]
answers = [[] for _ in texts]
for number in range(24):
    step = RaggedStep(storage, tables, [len(ids) for ids in new])
    if number < 2:
        print(
            f"step {number}: query_start_loc {step.query_start_loc.tolist()}, context_lens {step.context_lens.tolist()}"
        )
    logits = model(torch.tensor([[token for ids in new for token in ids]]), step)
    picked = logits[0, step.query_start_loc[1:] - 1].argmax(-1).tolist()
    for answer, token in zip(answers, picked, strict=True):
        answer.append(token)
    new = [[token] for token in picked]

for text, answer in zip(texts, answers, strict=True):
    alone = [int(token) for token in decode(model, torch.tensor([tokenizer.encode(text)]), 24)]
    assert answer == alone
    print(f"{text} → {tokenizer.decode(answer[:8])} …")
print("Together or alone: the same tokens.")

# %% [markdown]
# **Question 5.** In the next step the three sequences decode, and a fourth comes with a prompt of 10 tokens, last in the
# batch. What is `query_start_loc`, as a list?

# %%
query_start_loc = None

# %%
tables.append(BlockTable(pool))
step = RaggedStep(storage, tables, [1, 1, 1, 10])
check(query_start_loc, step.query_start_loc.tolist())

# %% [markdown]
# ## 7. Four answers to one prompt
#
# A prompt of 32 tokens in two full blocks. Four answers of 20 tokens each, once as four caches that know nothing of each
# other, and once as forks.
#
# **Question 6.** How many blocks of 16 are in use at the end, without and with sharing?

# %%
blocks_without_sharing = None
blocks_with_sharing = None


# %%
def sampled(seed):
    """A pick at random by the model's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    return lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def answer(cache, first, seed):
    """20 tokens after a prompt that is in the cache already."""
    token, pick = first, sampled(seed)
    for _ in range(20):
        token = pick(model(token[:, None], cache)[:, -1])


def blocks_in_use(share):
    """Blocks of the pool in use after four answers to one prompt."""
    pool = BlockPool(64, 16)
    storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
    shape = (config.num_layers, 1, config.num_kv_heads, 512, config.head_dim)
    prompt = torch.tensor([tokens[:32]])
    first = PagedKVCache(*shape, storage=storage)
    logits = model(prompt, first)
    caches = [first]
    for _ in range(3):
        caches.append(first.fork() if share else PagedKVCache(*shape, storage=storage))
        if not share:
            model(prompt, caches[-1])
    for seed, cache in enumerate(caches):
        answer(cache, logits[:, -1].argmax(-1), seed)
    return pool.num_used


check(blocks_without_sharing, blocks_in_use(share=False))
check(blocks_with_sharing, blocks_in_use(share=True))

# %% [markdown]
# The prompt's two blocks were computed once and stored once. With a prompt of 40 tokens the third block would be
# unfinished, and the forks could not go on: that is phase 8's copy-on-write.
