# %% [markdown]
# # Phase 1: the cache at work
#
# What does a KV cache save, what does it hold, and what does it still have to read? Here you watch one: step by step on
# a real model, with the clock running.
#
# Set `MINE = True` in the first cell to run everything on your own files in `labs/phase-01-dense-cache/`, then restart
# the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(1)))

from minicache.cache.attention import causal_attention
from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode

print("Attention, cache and decoding are", "yours." if MINE else "the reference's.")

# %%
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from minicache.arithmetic.arithmetic import step_flops
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache.palette import color
from minicache.arithmetic.specs import MINIGPT
from minicache.engine.timing import timed

torch.set_num_threads(1)  # a second thread makes steps this small slower, and their times noisy
torch.manual_seed(0)
tokenizer = Tokenizer()
model = load_minigpt()
config = model.config


def new_cache(max_seq_len=512, batch_size=1):
    """A cache for this model."""
    return KVCache(config.num_layers, batch_size, config.num_kv_heads, max_seq_len, config.head_dim)


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
    direction = "high" if answer > right else "low"
    assert answer == right, f"{answer:,} is too {direction}"
    print("Right.")


# %% [markdown]
# ## 1. What is the model shown?
#
# A model that does nothing but note the shapes, wrapped around the real one.


# %%
class Watched:
    """The model, and how many positions each call computed."""

    def __init__(self):
        self.positions = []

    def __call__(self, token_ids, cache=None):
        self.positions.append(token_ids.shape[1])
        return model(token_ids, cache)


prompt = torch.tensor([tokenizer.encode("Yesterday I")])
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
check(positions_without, counted["without"])
check(positions_with, counted["with"])

# %% [markdown]
# ## 2. Time per token
#
# The same text up to 256 tokens, three times in each way, and of each step the fastest. On a machine that does other
# things too, expect spikes.

# %% alt="Milliseconds for one more token against its position: full recomputation rises, the KV cache stays flat."
NUM_STEPS = 256
milliseconds = {}
for name in ("full recomputation", "KV cache"):
    runs = []
    for _ in range(3):
        steps = decode(model, prompt[:, :1], NUM_STEPS, cache=new_cache() if name == "KV cache" else None)
        runs.append([seconds * 1e3 for _, seconds in timed(steps)])
    milliseconds[name] = [min(times) for times in zip(*runs, strict=True)]

ax = axes("position of the token", "milliseconds")
for name, role in (("full recomputation", "wasted"), ("KV cache", "generated")):
    ax.plot(range(1, NUM_STEPS + 1), milliseconds[name], color=color(role), label=name)
ax.set_yscale("log")
ax.legend(frameon=False)
plt.show()

# %%
totals = {name: sum(times) for name, times in milliseconds.items()}
print(f"positions computed: {NUM_STEPS * (NUM_STEPS + 1) // 2:,} against {NUM_STEPS:,}")
for name, total in totals.items():
    print(f"{name:20} {total / 1e3:6.2f} s for {NUM_STEPS} tokens")
print(f"{totals['full recomputation'] / totals['KV cache']:.1f} times as fast")

# %% [markdown]
# The positions differ by a factor of 128, the times by much less: a position that is computed alone costs more than one
# in a crowd, because the weights are read for it alone.
#
# ## 3. Bytes: reserved and in use

# %% alt="Bytes of the cache against tokens: reserved is a flat line at 1,024 KiB, used rises in a straight line to meet it at 512 tokens."
cache = new_cache()
used = [cache.nbytes_used]
for _ in decode(model, prompt[:, :1], 512, cache=cache):
    used.append(cache.nbytes_used)

ax = axes("tokens in the cache", "KiB")
ax.plot(range(len(used)), [nbytes / 1024 for nbytes in used], color=color("generated"), label="nbytes_used")
ax.axhline(cache.nbytes / 1024, color=color("wasted"), linestyle="--", label="nbytes")
ax.legend(frameon=False, loc="lower right")
plt.show()
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
check(bytes_never_used, cache.nbytes - cache.nbytes_used)

# %% [markdown]
# ## 4. What still grows: rows read
#
# A step computes one position, and its attention reads all rows. Here a cache that counts them.


# %% alt="FLOPs of one decode step against its position: the linear layers are a flat line at 1.6 million, attention rises from nothing to 1 million at position 512."
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

positions = range(1, 513)
linear = 2 * MINIGPT.num_parameters
ax = axes("position of the token", "million FLOPs in one decode step")
ax.plot(positions, [linear / 1e6] * 512, color=color("generated"), label="linear layers")
attention = [(step_flops(MINIGPT, 1, position - 1) - linear) / 1e6 for position in positions]
ax.plot(positions, attention, color=color("end"), linestyle="--", label="attention")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# **Question 3.** At how many tokens would attention cost as many FLOPs as the linear layers? MiniGPT's positions end at
# 512; continue the line. Use `2 * MINIGPT.num_parameters` and 4 · 4 · 4 · 32 FLOPs a row, and round up.

# %%
tokens_until_equal = None

# %%
check(tokens_until_equal, next(s for s in range(1, 10_000) if step_flops(MINIGPT, 1, s - 1) >= 2 * linear))

# %% [markdown]
# ## 5. The mask
#
# Which keys does each query see? Blue is seen, grey is hidden. Ask the function: with equal keys, all visible values weigh the same, so that a value
# of 1 among zeros shows in the outputs of just those queries that see it.

# %% alt="Three masks over six keys for T = 6, 3 and 1: each is the last T rows of a lower triangle."
num_tokens = 6
seen_or_hidden = ListedColormap([color("free"), color("generated")])
_, panels = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="constrained")
for panel, num_new in zip(panels, (6, 3, 1), strict=True):
    one_at_a_time = torch.eye(num_tokens)[None, None]  # token s has its 1 in column s
    q = torch.zeros(1, 1, num_new, num_tokens)
    k = torch.zeros(1, 1, num_tokens, num_tokens)
    seen = causal_attention(q, k, one_at_a_time)[0, 0] > 0
    assert seen.equal(torch.ones(num_new, num_tokens, dtype=torch.bool).tril(num_tokens - num_new))
    panel.imshow(seen, cmap=seen_or_hidden, vmin=0, vmax=1, extent=(-0.5, 5.5, 5.5, 5.5 - num_new))
    panel.set(title=f"T = {num_new}, S = {num_tokens}", xlabel="key", ylabel="query's position", ylim=(5.5, -0.5))
plt.show()

# %% [markdown]
# ## 6. A batch of unlike lengths
#
# Sequences of 200, 1,500 and 60 tokens go into one dense batch, padded to the longest.
#
# **Question 4.** How many rows of each layer are padding? And with blocks of 16 rows, how many rows that are taken
# would hold no token?

# %%
rows_of_padding = None
rows_lost_to_blocks = None

# %%
lengths = (200, 1500, 60)
check(rows_of_padding, sum(max(lengths) - length for length in lengths))
check(rows_lost_to_blocks, sum(-length % 16 for length in lengths))

# %% [markdown]
# That difference is what the next phases are about.
