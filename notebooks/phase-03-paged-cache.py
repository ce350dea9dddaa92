# %% [markdown]
# # Phase 3: the paged cache at work
#
# How much memory does a text of 120 tokens need? A dense cache reserves memory for the longest possible text; a paged
# cache allocates a block when it needs one. Below, one model generates the same text with both. This notebook measures
# what blocks save when many sequences share a pool, checks that the tokens stay the same, and measures the cost of
# reading through a table.

# %% alt="KiB against tokens. The dense cache has 1,024 KiB reserved from the first token on; the blocks of the paged cache rise in steps of 32 KiB close above the bytes in use."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(3, mine=MINE)

import torch
from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import decode
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt

model, tokenizer = load_minigpt(), Tokenizer()
config = model.config
shape = (config.num_layers, 1, config.num_kv_heads, 512, config.head_dim)
dense, paged = KVCache(*shape), PagedKVCache(*shape, block_size=16)
prompt = torch.tensor([tokenizer.encode("Yesterday I")])

expected = [int(token) for token in decode(model, prompt, 120, cache=dense)]
tokens, kib = [], {"dense: reserved": [], "paged: blocks taken": [], "in use, either way": []}
for token in decode(model, prompt, 120, cache=paged):
    tokens.append(int(token))
    for line, nbytes in zip(
        kib.values(), (dense.nbytes, paged.nbytes_allocated, paged.nbytes_used)
    ):
        line.append(nbytes / 1024)
look = {"roles": ("wasted", "end", "generated"), "marks": False}
nb.lines(range(2, 122), kib, "tokens in the cache", "KiB", **look)

# %% [markdown]
# ## 1. The same tokens

# %%
assert tokens == expected
print("The tokens are the same:", tokenizer.decode(tokens[:9]), "…")

# %% [markdown]
# **Question 1.** With 121 tokens in the cache and blocks of 16, how many bytes are allocated and empty? A token of MiniGPT
# takes 2,048 bytes.

# %%
bytes_taken_and_empty = None

# %%
nb.check(bytes_taken_and_empty, paged.nbytes_allocated - paged.nbytes_used)

# %% [markdown]
# ## 2. One pool, many sequences
#
# The pool has 512 blocks of 16 tokens, 8,192 tokens in total. A sequence is admitted when its prompt fits and one spare
# block is left for each running sequence. Its final length is not known in advance. Each step gives every sequence one
# token. If the pool has too few blocks, the newest sequence goes back to the queue (phase 6 does this properly).

# %%
import random

from minicache.memory.blocks import BlockPool, BlockTable, blocks_for

BLOCK_SIZE, NUM_BLOCKS = 16, 512
rng = random.Random(0)
pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
waiting = [(rng.randint(10, 200), rng.randint(20, 600)) for _ in range(400)]  # prompt, new tokens
running = []


def one_step():
    """Admit, make room, give each sequence a token, end what is complete. Returns evictions."""
    evicted = 0
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
    for table, num_prompt, num_new in list(running):
        table.append(1)
        if table.num_tokens == num_prompt + num_new:
            table.release()
            running.remove((table, num_prompt, num_new))
    return evicted


# %% alt="Rows against steps, stacked: rows with a token fill most of the 8,192; rows taken and empty are a thin band of a few per cent on top of them; a little more is free."
rows, batch, evicted = {"with a token": [], "taken and empty": [], "free": []}, [], 0
for _ in range(600):
    evicted += one_step()
    num_tokens = sum(table.num_tokens for table, _, _ in running)
    empty = pool.num_used * BLOCK_SIZE - num_tokens
    assert empty <= len(running) * (BLOCK_SIZE - 1)  # the bound, at every step
    for line, count in zip(rows.values(), (num_tokens, empty, pool.num_free * BLOCK_SIZE)):
        line.append(count)
    batch.append(len(running))
pool.check()

nb.stack(range(600), rows, "step", "rows", roles=("generated", "wasted", "free"))
full, taken_and_empty, _ = map(sum, rows.values())
print(f"of the rows taken, {full / (full + taken_and_empty):.1%} hold a token, over all steps")
dense_batch = NUM_BLOCKS * BLOCK_SIZE // 800
print(f"{sum(batch) / len(batch):.1f} sequences at once; dense, with 800 rows each, {dense_batch}")
print(f"{evicted} times a sequence had to give its blocks back")

# %% [markdown]
# **Question 2.** 20 sequences are running. How many slots can be allocated and empty at most, in blocks of 16? And in
# blocks of 128?

# %%
at_most_with_16 = None
at_most_with_128 = None

# %%
nb.check(at_most_with_16, 20 * (blocks_for(1, 16) * 16 - 1))
nb.check(at_most_with_128, 20 * (blocks_for(1, 128) * 128 - 1))

# %% [markdown]
# ## 3. First in, first out
#
# How long do the contents of a freed block survive? Take a pool of 64 blocks, some of them in use, and free one. How many
# allocations later is it used again?

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

curves = {
    "a queue: first in, first out": lifetimes,
    "a stack: last in, first out": [1] * 63,
}
names = ("other blocks that are free", "allocations until it is used again")
nb.lines(range(1, 64), curves, *names, roles=("generated", "wasted"), marks=False)

# %% [markdown]
# How fast is the pool? The next cell allocates and frees one block many times:


# %%
def pairs(count=100_000):
    """Allocate and free one block, many times."""
    allocate, free = pool.allocate, pool.free
    for _ in range(count):
        free(allocate(1))


pool = BlockPool(10_000, 16)
milliseconds = nb.fastest({"pairs": pairs}, repeats=3)["pairs"]
print(f"{100_000 / milliseconds / 1e3:.2f} million pairs of allocate and free in a second")

# %% [markdown]
# ## 4. Block size and memory access
#
# The next cell gathers the same 4,096 keys of one layer of Llama-3-8B (8 KV heads of 128 numbers, float32) from blocks
# of 1 to 256 tokens in random order.

# %% alt="Milliseconds to gather 4,096 rows against block size from 1 to 256, the sizes on a logarithmic axis: the curve falls to about half from blocks of one row to blocks of 16, and is nearly flat from there."
from minicache import kernels

NUM_ROWS = 4096
sizes = [2**power for power in range(9)]
contestants = {}
for size in sizes:
    cache, table = torch.randn(NUM_ROWS // size, size, 8, 128), torch.randperm(NUM_ROWS // size)
    contestants[size] = lambda cache=cache, table=table: kernels.gather_kv(cache, table, NUM_ROWS)
milliseconds = nb.fastest(contestants, repeats=30)
curve = {"": [milliseconds[size] for size in sizes]}
nb.lines(sizes, curve, "block size, rows", "milliseconds", doubling=True, ylim=(0, None))
for size in (1, 16, 256):
    print(f"blocks of {size}: {milliseconds[size]:.2f} ms")

# %% [markdown]
# The keys of a block of 16 take 64 KiB, enough for the copy to run at full speed. Larger blocks do not make reading
# faster; they make the tables shorter and cheaper to fill.
#
# **Question 3.** There are 64 sequences of 4,096 tokens. How many entries do their block tables have in all, with
# blocks of 1 and of 16?

# %%
entries_with_1 = None
entries_with_16 = None

# %%
nb.check(entries_with_1, 64 * blocks_for(4096, 1))
nb.check(entries_with_16, 64 * blocks_for(4096, 16))

# %% [markdown]
# ## 5. Methods of attention
#
# The batch has 32 sequences of 64 to 1,024 tokens, with one new query each; there are 8 query heads and 2 KV heads,
# with d = 64 and blocks of 16.

# %%
NUM_SEQUENCES, HEADS, KV_HEADS, HEAD_DIM = 32, 8, 2, 64
lengths = [rng.randint(64, 1024) for _ in range(NUM_SEQUENCES)]
pool = BlockPool(sum(blocks_for(length, 16) for length in lengths), 16)
order = pool.allocate(pool.num_blocks)
rng.shuffle(order)
pool.free(order)  # from now on the pool hands out blocks in random order, as after hours of use
tables = [BlockTable(pool) for _ in lengths]
for table, length in zip(tables, lengths):
    table.append(length)

q = torch.randn(NUM_SEQUENCES, HEADS, HEAD_DIM)
k_cache, v_cache = torch.randn(2, pool.num_blocks, 16, KV_HEADS, HEAD_DIM)
width = max(len(table.block_ids) for table in tables)
padded_tables = [table.block_ids + [0] * (width - len(table.block_ids)) for table in tables]
block_tables, context_lens = torch.tensor(padded_tables), torch.tensor(lengths)

# %% [markdown]
# These are the first three methods: the same keys and values without paging, sequence by sequence;
# `paged_decode_attention`, the function of task 7; and a padded gather with a mask.

# %%
import torch.nn.functional as F

from minicache.cache.attention import causal_attention

contiguous = []
for row, length in zip(block_tables, lengths):
    k, v = (kernels.gather_kv(cache, row, length) for cache in (k_cache, v_cache))
    contiguous.append([rows.transpose(0, 1)[None].contiguous() for rows in (k, v)])


def without_paging():
    """The same rows side by side in memory."""
    one_query = [q[i][None, :, None] for i in range(NUM_SEQUENCES)]
    found = [causal_attention(query, *kv) for query, kv in zip(one_query, contiguous)]
    return torch.cat(found)[:, :, 0]


def through_the_table():
    return kernels.paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens)


def padded():
    """Gather everything, as long as the longest, and mask the padding."""
    k, v = (cache[block_tables].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    visible = torch.arange(k.shape[2]) < context_lens[:, None]
    rows = q.view(NUM_SEQUENCES, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    masked = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible[:, None, None])
    return masked.flatten(1, 2)


# %% [markdown]
# The fourth method gathers nothing: it computes attention in each block separately, then merges each sequence's partial
# results.

# %%
owner = torch.zeros(pool.num_blocks, dtype=torch.int64)  # of each block
held = torch.zeros(pool.num_blocks, dtype=torch.int64)  # how many of its rows are tokens
for i, table in enumerate(tables):
    owner[table.block_ids] = i
    held[table.block_ids] = 16
    held[table.block_ids[-1]] = table.num_tokens - 16 * (len(table.block_ids) - 1)


def by_block():
    """Each block on its own; then each sequence's blocks are merged by their sums."""
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


# %% alt="Four bars of milliseconds. Contiguous rows and paged decode attention are the shortest, block by block takes longer, and the padded gather with a mask several times as long as the first two."
ways = {
    "contiguous rows": without_paging,
    "through the table": through_the_table,
    "block by block": by_block,
    "padded, with a mask": padded,
}
for way in ways.values():
    torch.testing.assert_close(way(), without_paging())
milliseconds = nb.fastest(ways, repeats=30)
nb.bars(
    milliseconds, "milliseconds", roles=("free", "generated", "shared", "wasted"), text="{:.1f}"
)

# %% [markdown]
# **Question 4.** For how many rows does the padded method gather keys, padding included? How many of them are tokens?
# `lengths` and `width` are above.

# %%
rows_gathered = None
rows_of_tokens = None

# %%
nb.check(rows_gathered, NUM_SEQUENCES * width * 16)
nb.check(rows_of_tokens, sum(lengths))

# %% [markdown]
# ## 6. The ragged step
#
# The model processes three texts of different length in one forward pass a step: first three prefills, then three
# decodes. Each text must get the same tokens as alone.

# %%
from minicache.cache.paged import PagedStorage, RaggedStep

texts = ["Yesterday I", "Tomorrow she will cook fish .", "They"]
pool = BlockPool(64, 16)
storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
tables = [BlockTable(pool) for _ in texts]
new = [tokenizer.encode(text) for text in texts]
answers = [[] for _ in texts]
for number in range(24):
    step = RaggedStep(storage, tables, [len(ids) for ids in new])
    if number < 2:
        found = step.query_start_loc.tolist(), step.context_lens.tolist()
        print(f"step {number}: query_start_loc {found[0]}, context_lens {found[1]}")
    logits = model(torch.tensor([[token for ids in new for token in ids]]), step)
    picked = logits[0, step.query_start_loc[1:] - 1].argmax(-1).tolist()
    for answer, token in zip(answers, picked):
        answer.append(token)
    new = [[token] for token in picked]

for text, answer in zip(texts, answers):
    alone = [int(token) for token in decode(model, torch.tensor([tokenizer.encode(text)]), 24)]
    assert answer == alone
    print(f"{text} → {tokenizer.decode(answer[:8])} …")
print("Together or alone: the same tokens.")

# %% [markdown]
# **Question 5.** In the next step the three sequences decode, and a fourth arrives with a prompt of 10 tokens, last in the
# batch. What is `query_start_loc`, as a list?

# %%
query_start_loc = None

# %%
tables.append(BlockTable(pool))
step = RaggedStep(storage, tables, [1, 1, 1, 10])
nb.check(query_start_loc, step.query_start_loc.tolist())

# %% [markdown]
# ## 7. Four answers to one prompt
#
# A prompt of 32 tokens fills two blocks. The model generates four answers of 20 tokens each, first with four separate
# caches, then with forks.
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


nb.check(blocks_without_sharing, blocks_in_use(share=False))
nb.check(blocks_with_sharing, blocks_in_use(share=True))

# %% [markdown]
# With forks, the prompt's two blocks were computed once and stored once. With a prompt of 40 tokens the third block
# would be unfinished, and the forks could not append. Phase 8 solves this with copy-on-write.
#
# ## Your experiment: which block size?
#
# Small blocks waste fewer slots and make longer tables. Which size would you choose for *your* texts?
#
# Enter the lengths of the sequences that your server runs at once. **Write down the largest block size at which less than
# a twentieth of the allocated slots are empty**, then run the cell. Then try chats of 20 to 100 tokens, and documents of
# 8,000.

# %% alt="Two panels against block sizes from 1 to 256. Per cent of the rows taken that are empty rises from 0, reaching 5 per cent near 64 rows a block for sequences of 100 to 1,000 tokens; entries of all block tables halve with each doubling."
YOUR_LENGTHS = [rng.randint(100, 1000) for _ in range(64)]
YOUR_PREDICTION = None

percents, entries = [], []
for size in sizes:
    pool = BlockPool(sum(blocks_for(length, size) for length in YOUR_LENGTHS), size)
    for length in YOUR_LENGTHS:
        BlockTable(pool).append(length)
    percents.append(100 * (1 - sum(YOUR_LENGTHS) / (pool.num_used * size)))
    entries.append(pool.num_used)
left, right = nb.panels(1, 2)
look = {"doubling": True, "ylim": (0, None)}
nb.lines(sizes, {"": percents}, "block size", "% of the rows taken are empty", ax=left, **look)
nb.lines(
    sizes,
    {"": entries},
    "block size",
    "entries of all tables",
    ax=right,
    doubling=True,
    yscale="log",
)
largest = max(size for size, percent in zip(sizes, percents) if percent < 5)
print(f"less than 5 % empty up to blocks of {largest}; you predicted {YOUR_PREDICTION}")

# %% [markdown]
# **What to look for.** On average about half of a last block is empty, whatever the length: (size − 1) / 2 slots a
# sequence. So the share depends only on the mean length: it reaches a twentieth when the block is about a tenth of the
# mean. The number of sequences does not matter; try it.
