# %% [markdown]
# # Phase 12: production defaults, measured
#
# TODO: introduction

# %%
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(12, mine=MINE)

# %% [markdown]
# ## 1. One step ahead

# %% [markdown]
# ## 2. Several kinds of cache
#
# A request of 8,000 prompt tokens and 192 generated ones, in Gemma 3 1B: four layers that see all tokens, and 22 that see
# 512. Once all layers keep all tokens; then the layers form seven groups of four, with prompts in chunks of 512 tokens and
# of 2,048. How much memory does it hold?

# %% alt="MiB of KV cache against tokens that are scheduled, 0 to 8,192. One table for all layers rises in a straight line to 208. With groups the request holds 44 at the end; in chunks of 512 it reaches 54 before that, in chunks of 2,048 about 87."
from minicache.request import Request
from minicache.scheduler import create_scheduler


def held(windows, kib, budget=512, prompt=8000, generated=192):
    """Tokens of a request, and MiB that its blocks have, step by step. A block of 16 tokens has `kib` KiB."""
    options = {} if windows is None else {"windows": windows}
    scheduler = create_scheduler(
        "chunked", num_blocks=4000, max_num_batched_tokens=budget, **options
    )
    request = Request("r", [1] * prompt, generated + 1)
    scheduler.add_request(request)
    num_tokens, mib = [], []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        num_tokens.append(request.num_computed_tokens + output.num_scheduled_tokens["r"])
        mib.append(scheduler.pool.num_used * kib / 1024)
        scheduler.update_from_output(output, {"r": 0})
    return num_tokens, mib


GEMMA_1B = (None,) + (512,) * 6  # seven groups of four layers, 1 KiB a token and layer
runs = {
    "one table": held(None, 16 * 26),
    "groups, chunks of 512": held(GEMMA_1B, 16 * 4),
    "groups, chunks of 2,048": held(GEMMA_1B, 16 * 4, budget=2048),
}
tokens = {name: run[0] for name, run in runs.items()}
curves = {name: run[1] for name, run in runs.items()}
nb.lines(tokens, curves, "tokens", "MiB of KV cache", marks=False, ylim=(0, None))
for name, mib in curves.items():
    print(f"{name}: {max(mib):.0f} MiB at most, {mib[-1]:.0f} at the end")

# %% [markdown]
# A chunk makes every window hold what the chunk's first token sees and the chunk itself. In decode only the four full layers
# go on growing.
#
# **Question 1.** Gemma 3 4B has 34 layers, 5 of them full; the windows have 1,024 tokens, and a layer stores 4 KiB a token.
# How many MiB does a request of 8,192 tokens hold, in groups of five layers?

# %%
mib_of_4b = None

# %%
nb.check(mib_of_4b, round(held((None,) + (1024,) * 6, 16 * 4 * 5)[1][-1]))

# %% [markdown]
# Now prefixes. Three prompts of 4,000 tokens begin with the same 3,000. How many tokens does each compute, if the windows
# keep only what a prompt's end needs (`retention` 0), or all blocks (None)?


# %%
def computed(retention, common=3000, length=4000):
    """The tokens that each of three prompts computes, one after the other, and how many blocks are cached then."""
    options = {"windows": GEMMA_1B, "prefix_caching": True, "prefix_cache_retention": retention}
    scheduler = create_scheduler("chunked", num_blocks=4000, **options)
    found = []
    for number in range(3):
        own = range(10_000 * (number + 1), 10_000 * (number + 1) + length - common)
        request = Request(number, [*range(common), *own], 1)
        scheduler.add_request(request)
        output = scheduler.schedule()
        found.append(output.num_scheduled_tokens[number])
        scheduler.update_from_output(output, {number: 0})
    return found, scheduler.pool.num_cached


for retention in (0, None):
    tokens, cached = computed(retention)
    print(f"retention {retention}: computed {tokens}, {cached:,} blocks cached")

# %% [markdown]
# To keep all is best for the second prompt and costs more blocks, which in a full pool evict those of other prompts.
#
# **Question 2.** With a retention of 1,024, the windows also keep what every multiple of 1,024 tokens needs. How many tokens
# does the second prompt compute?

# %%
second_with_1024 = None

# %%
nb.check(second_with_1024, computed(1024)[0][1])

# %% [markdown]
# ## 3. Below the prefix cache

# %% [markdown]
# ## 4. Only what is allowed
