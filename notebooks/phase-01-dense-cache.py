# %% [markdown]
# # Phase 1: the cache at work
#
# What does a KV cache save? Below, a model generates the same text twice: once it recomputes every position for each
# new token, and once it keeps keys and values. One curve rises and the other does not. This notebook counts the
# positions that are computed, the bytes that are held, and the KV entries that are still read.

# %% alt="Milliseconds for one more token against its position, from 1 to 256: full recomputation rises about tenfold, the KV cache stays flat."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(1, mine=MINE)

import torch
from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.engine.timing import timed
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt

model = load_minigpt()
config = model.config
prompt = torch.tensor([Tokenizer().encode("Yesterday I")])


def new_cache(max_seq_len=512, batch_size=1):
    return KVCache(config.num_layers, batch_size, config.num_kv_heads, max_seq_len, config.head_dim)


NUM_STEPS, milliseconds = 256, {}
for name in ("full recomputation", "KV cache"):
    runs = []
    for _ in range(3):
        steps = decode(model, prompt, NUM_STEPS, cache=new_cache() if name == "KV cache" else None)
        runs.append([1e3 * seconds for _, seconds in timed(steps)])
    milliseconds[name] = list(map(min, *runs))  # of each step the fastest of three
look = {"roles": ("wasted", "generated"), "marks": False, "yscale": "log"}
nb.lines(range(NUM_STEPS), milliseconds, "new token", "milliseconds", **look)

# %% [markdown]
# ## 1. What is the model's input?
#
# A wrapper around the model records the shapes of its inputs.


# %%
class Watched:
    """The model, and how many positions each call computed."""

    def __init__(self):
        self.positions = []

    def __call__(self, token_ids, cache=None):
        self.positions.append(token_ids.shape[1])
        return model(token_ids, cache)


recomputing, caching = Watched(), Watched()
without = [int(token) for token in decode(recomputing, prompt, 12)]
through = [int(token) for token in decode(caching, prompt, 12, cache=new_cache())]

print("positions without a cache ", recomputing.positions)
print("positions with a cache    ", caching.positions)
assert without == through
print("The tokens are the same.")

# %% [markdown]
# **Question 1.** From the same prompt of two tokens, how many positions would 100 new tokens cost, without a cache and
# with one? Work it out first, then write it here.

# %%
positions_without = None
positions_with = None

# %%
counted = {}
for name, cache in (("without", None), ("with", new_cache())):
    watched = Watched()
    for _ in decode(watched, prompt, 100, cache=cache):
        pass
    counted[name] = sum(watched.positions)
nb.check(positions_without, counted["without"])
nb.check(positions_with, counted["with"])

# %% [markdown]
# ## 2. Time per token
#
# The first picture shows 256 tokens with and without a cache. (Expect spikes on a machine that is also doing other
# work.) The next cell adds the steps up:

# %%
prompt_len = prompt.shape[1]
positions = {
    "without": sum(prompt_len + step for step in range(NUM_STEPS)),
    "with": prompt_len + NUM_STEPS - 1,
}
totals = {name: sum(times) for name, times in milliseconds.items()}
print(f"positions computed: {positions['without']:,} against {positions['with']:,}")
for name, total in totals.items():
    print(f"{name:20} {total / 1e3:6.2f} s for {NUM_STEPS} tokens")
print(f"{totals['full recomputation'] / totals['KV cache']:.1f} times as fast")

# %% [markdown]
# The positions differ by a factor of about 130, the times by much less: a position computed alone costs more than one
# computed with others, because the weights are read for it alone.
#
# ## 3. Bytes: reserved and in use

# %% alt="Bytes of the cache against tokens: reserved is a flat line at 1,024 KiB, used rises in a straight line to meet it at 512 tokens."
cache = new_cache()
used = [cache.nbytes_used]
for _ in decode(model, prompt[:, :1], 512, cache=cache):
    used.append(cache.nbytes_used)

curves = {
    "nbytes_used": [nbytes / 1024 for nbytes in used],
    "nbytes": [cache.nbytes / 1024] * len(used),
}
names = ("tokens in the cache", "KiB")
nb.lines(range(len(used)), curves, *names, roles=("generated", "wasted"), marks=False)
print(f"{cache.nbytes:,} bytes reserved, {used[-1]:,} used in the end")

# %% [markdown]
# **Question 2.** A text has a prompt of 20 tokens and ends after 80 new ones. How many bytes of the 1,048,576 reserved
# were never used? Mind the last token.

# %%
bytes_never_used = None

# %%
cache = new_cache()
for _ in decode(model, torch.zeros(1, 20, dtype=torch.int64), 80, cache=cache):
    pass
nb.check(bytes_never_used, cache.nbytes - cache.nbytes_used)

# %% [markdown]
# ## 4. What still grows: KV entries read
#
# A step computes one position, and its attention reads all KV entries. The cache below counts them: each has one row in
# the keys that `read` returns.


# %%
class Counting(KVCache):
    """A cache that notes how many rows of keys each attend reads, per KV head."""

    rows = 0

    def attend(self, layer, q):
        """As the class above, and count."""
        self.rows += self.read(layer)[0].shape[2]
        return super().attend(layer, q)


counting = Counting(config.num_layers, 1, config.num_kv_heads, 512, config.head_dim)
rows_read = []
for _ in decode(model, prompt[:, :1], 512, cache=counting):
    rows_read.append(counting.rows // config.num_layers)
print("rows read per layer and head, after 1, 2, 3, 4 steps:", rows_read[:4])
print(f"after 512 steps: {rows_read[-1]:,}")
assert rows_read[-1] == 512 * 513 // 2

# %% alt="FLOPs of one decode step against its position: the linear layers are a flat line at 1.6 million, attention rises from nothing to 1 million at position 512."
from minicache.arithmetic.arithmetic import step_flops
from minicache.arithmetic.specs import MINIGPT

linear = 2 * MINIGPT.num_parameters
attention = [(step_flops(MINIGPT, 1, position - 1) - linear) / 1e6 for position in range(1, 513)]
flops = {"linear layers": [linear / 1e6] * 512, "attention": attention}
names = ("position of the token", "million FLOPs in one decode step")
nb.lines(range(1, 513), flops, *names, marks=False)

# %% [markdown]
# **Question 3.** At how many tokens would attention cost as many FLOPs as the linear layers? MiniGPT's positions end at
# 512; extrapolate the line. Use `2 * MINIGPT.num_parameters` and 4 · 4 · 4 · 32 FLOPs per entry (4 for each of 4
# layers, 4 query heads and 32 numbers), and round up.

# %%
tokens_until_equal = None

# %%
equal = next(s for s in range(1, 10_000) if step_flops(MINIGPT, 1, s - 1) >= 2 * linear)
nb.check(tokens_until_equal, equal)

# %% [markdown]
# ## 5. The mask
#
# Which keys does each query see? Blue is visible, grey is hidden. `causal_attention` itself shows it: with equal keys,
# all visible values have the same weight, so a value of 1 among zeros appears in the outputs of exactly those queries
# that see it.

# %% alt="Three masks over six keys for T = 6, 3 and 1: each is the last T rows of a lower triangle."
from minicache.cache.attention import causal_attention

num_tokens = 6
panels = nb.panels(1, 3, height=2.4)
for panel, num_new in zip(panels, (6, 3, 1)):
    one_at_a_time = torch.eye(num_tokens)[None, None]  # token s has its 1 in column s
    q = torch.zeros(1, 1, num_new, num_tokens)
    k = torch.zeros(1, 1, num_tokens, num_tokens)
    seen = causal_attention(q, k, one_at_a_time)[0, 0] > 0
    right = torch.ones(num_new, num_tokens, dtype=torch.bool).tril(num_tokens - num_new)
    assert seen.equal(right)
    positions = range(num_tokens - num_new, num_tokens)
    title = f"T = {num_new}, S = {num_tokens}"
    colours = [["generated" if each else "free" for each in line] for line in seen]
    nb.cells(colours, "key", "query's position", rows=list(positions), ax=panel, title=title)

# %% [markdown]
# ## 6. A batch of different lengths
#
# Sequences of 200, 1,500 and 60 tokens go into one dense batch, padded to the longest.
#
# **Question 4.** How many slots of each layer are padding? And with blocks of 16 slots, how many slots of the allocated
# blocks would hold no token?

# %%
rows_of_padding = None
rows_lost_to_blocks = None

# %%
lengths = (200, 1500, 60)
nb.check(rows_of_padding, sum(max(lengths) - length for length in lengths))
nb.check(rows_lost_to_blocks, sum(-length % 16 for length in lengths))

# %% [markdown]
# The next phases are about that difference.
#
# ## 7. On a real model
#
# SmolLM2-135M-Instruct answers a question, without a cache and with yours or the reference's. The tokens are the same.
# How many times as fast is the answer with a cache? With an answer of 64 tokens, will the ratio be larger or smaller?

# %%
from minicache.engine.loading import load_model, load_tokenizer

real_model = nb.real_model()
if real_model is not None:
    real, real_tokenizer = load_model(real_model, None, None), load_tokenizer(real_model)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    question = torch.tensor([real_tokenizer.apply_chat_template(messages)])
    sizes = real.config.num_layers, 1, real.config.num_kv_heads, 512, real.config.head_dim
    for name, cache in {"full recomputation": None, "KV cache": KVCache(*sizes)}.items():
        tokens, seconds = zip(*timed(decode(real, question, 24, cache=cache)))
        text = real_tokenizer.decode([int(token) for token in tokens])
        print(f"{name}: {sum(seconds):.1f} s, {text}")

# %% [markdown]
# ## Your experiment: what does a token cost in a batch?
#
# With a cache, one sequence's token takes about as long at position 256 as at position 1. What if 32 sequences decode
# together? Does a step take 32 times as long? Phase 0 has the argument, for a GPU.
#
# Choose a context and batch sizes. **Write down what a token will cost in the largest batch, as a fraction of the cost
# of a token alone**, with a cache and without. Then run the cell, and try a context of 8, and one of 256.

# %% alt="Milliseconds per token against the batch size, both doubling. With the KV cache a token of a larger batch costs far less than one alone; with full recomputation the curve lies higher and falls little."
YOUR_CONTEXT = 64
YOUR_BATCHES = [1, 2, 4, 8, 16, 32]
YOUR_PREDICTION = "with a cache …, without …"


def cost(batch_size, cached):
    """Milliseconds of a decode step, the fastest of eight, divided by the batch size."""
    cache = new_cache(batch_size=batch_size) if cached else None
    prompts = torch.randint(config.vocab_size, (batch_size, YOUR_CONTEXT))
    steps = [seconds for _, seconds in timed(decode(model, prompts, 9, cache=cache))]
    return 1e3 * min(steps[1:]) / batch_size


costs = {
    "full recomputation": [cost(batch_size, False) for batch_size in YOUR_BATCHES],
    "KV cache": [cost(batch_size, True) for batch_size in YOUR_BATCHES],
}
look = {"roles": ("wasted", "generated"), "doubling": True, "yscale": "log"}
nb.lines(YOUR_BATCHES, costs, "sequences in the batch", "milliseconds per token", **look)
print("You predicted:", YOUR_PREDICTION)
for name, each in costs.items():
    print(f"{name}: {each[0]:.2f} ms alone, {each[-1]:.3f} ms in a batch of {YOUR_BATCHES[-1]}")

# %% [markdown]
# **What to look for.** With a cache, a step reads the weights and launches the operations once for the whole batch, and
# each sequence adds one position. Without one, each sequence adds its whole context, and there is little left to share.
# The cache makes steps small enough for batching to pay off; phase 5 is about keeping that batch full.
