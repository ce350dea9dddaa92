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
#
# Request a has a prompt of 4 tokens; its second token is a stop token. b waits for a's blocks. In each iteration the
# engine schedules a step, and then commits the step before. A ? is a placeholder.

# %%
from minicache.request import Request
from minicache.scheduler.async_chunked import AsyncChunkedScheduler
from minicache.scheduler.chunked import ChunkedPrefillScheduler

STOP = 9
scheduler = AsyncChunkedScheduler(num_blocks=2, block_size=4)
a, b = Request("a", [1, 2, 3, 4], 9, stop_token_ids=[STOP]), Request("b", [1, 2, 3, 4, 5], 9)
for request in (a, b):
    scheduler.add_request(request)
tokens_of_a, before = [7, STOP, 5], None
for number in range(1, 5):
    output = scheduler.schedule()
    known = [*a.prompt_token_ids, *a.output_token_ids, *"?" * a.num_placeholders]
    print(f"schedule {number}: a is {known}, the step computes {output.num_scheduled_tokens}")
    if before is not None:
        token_ids = dict.fromkeys(before.num_scheduled_tokens, tokens_of_a[number - 2])
        finished = scheduler.update_from_output(before, token_ids)
        print(
            f"  commit {number - 1}: {token_ids}; finished: {[each.request_id for each in finished]}"
        )
    before = output

# %% [markdown]
# What is it worth? A simulated H100 with Llama-3-8B serves 256 requests, 64 at a time. Every answer ends with a stop token.
# The scheduler is the real one; a step takes the GPU the time of its roofline, and the CPU a fixed time for schedule and
# commit. `seconds_of` puts both on one clock.

# %% alt="How many times as fast one step ahead is, against the CPU's share of a step without overlap, from 0 to 70 %. The formula, the longer of the two, rises from 1 to 2 at 50 % and falls again. Answers of about 200 tokens lie almost on it. Answers of about 10 tokens lie a tenth to a fifth below it, and below 1 where the CPU's share is less than 10 %."
import random

from minicache.arithmetic.specs import H100, LLAMA_3_8B
from minicache.simulator.costs import RooflineCost, StepLoad

cost = RooflineCost(LLAMA_3_8B, H100, overhead_seconds=0.0)


def gpu_seconds(scheduler, num_tokens, overlaps):
    """What each step takes on the GPU, and how many tokens were computed for requests that had finished."""
    rng = random.Random(0)
    lengths = [rng.randint(num_tokens // 2, 3 * num_tokens // 2) for _ in range(256)]
    for number in range(256):
        scheduler.add_request(Request(number, [1] * 20, 999, stop_token_ids=[STOP]))
    steps, flying, in_vain = [], [], 0
    while scheduler.has_unfinished or flying:
        if scheduler.has_unfinished:
            output = scheduler.schedule()
            counts = output.num_scheduled_tokens.values()
            batch = [(new, each.num_computed_tokens) for new, each in zip(counts, output.scheduled)]
            steps.append(cost.step_seconds(StepLoad.of(batch)) if batch else 0.0)
            flying.append(output)
        if len(flying) > overlaps or not scheduler.has_unfinished:
            done = flying.pop(0)
            in_vain += sum(each.status.is_finished for each in done.scheduled)
            token_ids = {
                each.request_id: STOP
                if len(each.output_token_ids) == lengths[each.request_id] - 1
                else 7
                for each in done.scheduled
            }
            scheduler.update_from_output(done, token_ids)
    return steps, in_vain


def seconds_of(steps, cpu, overlaps):
    """When the last of these steps is over, if each takes the CPU so long."""
    if not overlaps:
        return sum(steps) + cpu * len(steps)
    now, ends = 0.0, [0.0]
    for seconds in steps:
        now += cpu  # schedule this step, and commit the one before the last
        ends.append(max(now, ends[-1]) + seconds)
        now = max(now, ends[-2])  # wait for the one before
    return ends[-1]


SHARES = [0.05 * number for number in range(15)]
curves = {"the longer of the two": [1 / max(share, 1 - share) for share in SHARES]}
dropped = {}
for num_tokens in (200, 10):
    options = {"num_blocks": 4000, "max_num_seqs": 64}
    in_turn, _ = gpu_seconds(ChunkedPrefillScheduler(**options), num_tokens, overlaps=False)
    ahead, dropped[num_tokens] = gpu_seconds(
        AsyncChunkedScheduler(**options), num_tokens, overlaps=True
    )
    cpu = [share / (1 - share) * sum(in_turn) / len(in_turn) for share in SHARES]
    curves[f"answers of about {num_tokens} tokens"] = [
        seconds_of(in_turn, each, overlaps=False) / seconds_of(ahead, each, overlaps=True)
        for each in cpu
    ]
labels = ("CPU's share of a step, %", "times as fast")
nb.lines([100 * share for share in SHARES], curves, *labels, marks=False, ylim=(0.8, 2.1))

# %% [markdown]
# Short answers gain less: a step in vain for each, and batch slots that are free one step later.
#
# **Question 1.** How many tokens are computed in vain for the 256 answers of about 10 tokens?

# %%
tokens_in_vain = None

# %%
nb.check(tokens_in_vain, dropped[10])

# %% [markdown]
# **Question 2.** A step takes the CPU 3 ms and the GPU 12 ms. How many times as fast is one step ahead, at best?

# %%
times_as_fast = None

# %%
nb.check(times_as_fast, (3 + 12) / max(3, 12))

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
