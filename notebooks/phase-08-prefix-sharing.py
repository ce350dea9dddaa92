# %% [markdown]
# # Phase 8: what two requests have in common
#
# Blocks that are found again, and blocks with two references. You look into a tenant's cache as another tenant, watch
# a prefix being forgotten from its tail, count what a prefix cache saves MiniGPT, and see answers and beams share
# their beginnings.
#
# Set `MINE = True` in the first cell to run everything on your own files in `labs/phase-08-prefix-sharing/`, then
# restart the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(8)))

from minicache.engine import BeamSearchParams, beam_search
from minicache.memory.prefix import CachingBlockPool, block_hash, root_hash
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache.scheduler.sharing import SharingScheduler

print("Hashes, pool, scheduler and search are", "yours." if MINE else "the reference's.")

# %%
import random
import time

import matplotlib.pyplot as plt
import torch

from minicache.engine.llm import LLM
from minicache.grammar import Tokenizer, sample_text
from minicache.model import load_minigpt
from minicache.palette import color
from minicache.request import Request
from minicache.engine.sampling import SamplingParams
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.paged import PagedScheduler
from minicache.simulator.costs import FixedCost
from minicache.simulator.prompts import ChatWorkload, chats
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import LengthDistribution

torch.set_num_threads(1)
SHARED, PLAIN = color("shared"), color("wasted")
model, tokenizer = load_minigpt(), Tokenizer()


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


def text_tokens(count, seed):
    """So many tokens of MiniGPT's language."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < count:
        tokens += tokenizer.encode_words(sample_text(rng))
    return tokens[:count]


# %% [markdown]
# ## 1. Whose block is it?
#
# A block's hash covers its tokens and its parent's hash. Two tenants ask a server the same thing. How many
# tokens does the second one find, if both have the same salt, and if each has its own?


# %%
def found_by_the_second(first_salt, second_salt, num_tokens=48):
    """Tokens that the second of two equal prompts need not compute."""
    scheduler = PrefixCachingScheduler(num_blocks=32, prefix_caching=True)
    prompt = text_tokens(num_tokens, seed=0)
    first, second = (
        Request(n, prompt, 4, cache_salt=s) for n, s in enumerate((first_salt, second_salt))
    )
    drive(scheduler, [first])
    drive(scheduler, [second])
    return second.num_cached_tokens


print("no salts:       ", found_by_the_second(None, None))
print("the same salt:  ", found_by_the_second("red", "red"))
print("salts of its own:", found_by_the_second("red", "blue"))

# %% [markdown]
# The first number is a leak. A client that sends prompts learns from the time to the first token what others have sent:
# guess a block, and see whether it was quick. The salt goes into the root, and so into every hash.
#
# **Question 1.** The prompt has 48 tokens, three full blocks of 16, and 32 of them are found: one token must be left to
# run the model on, and a block is found whole or not at all. How many are found of a prompt of 49?

# %%
found_of_49 = None

# %%
check(found_of_49, found_by_the_second(None, None, 49))

# %% [markdown]
# **Question 2.** Hashes are a chain. A prompt of ten blocks is sent again with its *fourth* block changed. How many of
# its blocks are found?

# %%
blocks_found = None

# %%
scheduler = PrefixCachingScheduler(num_blocks=64, prefix_caching=True)
prompt = text_tokens(160, seed=1)
changed = [*prompt[:48], *text_tokens(16, seed=2), *prompt[64:]]
second = Request("second", changed, 4)
drive(scheduler, [Request("first", prompt, 4)])
drive(scheduler, [second])
check(blocks_found, second.num_cached_tokens // 16)

# %% [markdown]
# ## 2. Free, and not forgotten
#
# A pool of 16 blocks holds a prefix of ten, whose request has finished. Now others come, one block each, and the prefix
# is not asked for. How much of it can still be found? In one run its request had freed its last block first, in the
# other its first.

# %% alt="Blocks of the prefix that are found, against blocks taken by others, from 0 to 16. Freed from its tail, it stays whole for 6 blocks and then shrinks by one with each to 0 at 16. Freed from its head, it is whole for 6 blocks, and gone at the seventh."
TAKEN = range(17)


def still_found(backwards, num_taken):
    """Blocks of a prefix of ten that are found when others have taken so many."""
    pool, hashes = CachingBlockPool(16, 16), [root_hash()]
    for number in range(10):
        hashes.append(block_hash(hashes[-1], [number] * 16))
    block_ids = pool.allocate(10)
    pool.cache(block_ids, hashes[1:])
    pool.free(block_ids[::-1] if backwards else block_ids)
    pool.allocate(num_taken)
    return len(pool.find(hashes[1:]))


_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
ax.plot(
    TAKEN, [still_found(True, n) for n in TAKEN], "o-", color=SHARED, label="last block freed first"
)
ax.plot(
    TAKEN,
    [still_found(False, n) for n in TAKEN],
    "s-",
    color=PLAIN,
    label="first block freed first",
)
ax.set(xlabel="blocks that others have taken", ylabel="blocks still found")
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The same blocks survive in both runs as long; but a chain without its head cannot be found.
#
# **Question 3.** The free list is now 6 blocks that never held anything, then the prefix, tail first. A request comes
# that finds 4 blocks of the prefix and needs 8 more. How many of the prefix's ten are found after that?

# %%
left_of_ten = None

# %%
pool, hashes = CachingBlockPool(16, 16), [root_hash()]
for number in range(10):
    hashes.append(block_hash(hashes[-1], [number] * 16))
block_ids = pool.allocate(10)
pool.cache(block_ids, hashes[1:])
pool.free(block_ids[::-1])
pool.share(pool.find(hashes[1:5]))
pool.allocate(8)
check(left_of_ten, len(pool.find(hashes[1:])))

# %% [markdown]
# ## 3. What it saves MiniGPT
#
# 24 requests with the same 320 tokens in front and 16 of their own, which differ from the first on; 8 tokens to
# generate. With the prefix cache and without: prompt tokens that the model computes, and seconds for all. The tokens that
# come out must be the same.


# %% alt="Two bar charts, without and with the prefix cache. Prompt tokens computed: 8,064 and 704. Seconds for all 24 requests: with the cache a fraction of those without."
class Prefilled(Observer):
    """Counts the prompt tokens that are computed."""

    def __init__(self):
        self.num_tokens = 0

    def on_schedule(self, scheduler, output):
        new = zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True)
        self.num_tokens += sum(count for request, count in new if not request.output_token_ids)


system = text_tokens(320, seed=3)
prompts = [[*system, 1 + number, *text_tokens(15, seed=100 + number)] for number in range(24)]


def serve(prefix_caching):
    """Answers, prompt tokens computed, seconds."""
    counts = Prefilled()
    scheduler = SharingScheduler(num_blocks=1024, max_model_len=512, prefix_caching=prefix_caching)
    llm = LLM(model, scheduler=scheduler, observers=[counts])
    start = time.perf_counter()
    answers = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    return [answer.token_ids for answer in answers], counts.num_tokens, time.perf_counter() - start


serve(False)  # the first run also loads what the library needs
without, tokens_without, seconds_without = serve(False)
with_cache, tokens_with, seconds_with = serve(True)
assert without == with_cache
_, panels = plt.subplots(1, 2, figsize=(7.2, 3), layout="constrained")
for ax, title, values, form in (
    (panels[0], "prompt tokens computed", (tokens_without, tokens_with), "{:,.0f}"),
    (panels[1], "seconds for all", (seconds_without, seconds_with), "{:.2f}"),
):
    bars = ax.bar(["without", "with"], values, color=[PLAIN, SHARED])
    ax.bar_label(bars, [form.format(value) for value in values], padding=2)
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_ylim(0, 1.15 * max(values))
    ax.set_yticks([])
plt.show()

# %% [markdown]
# **Question 4.** All 24 came at once, and were admitted in one step. Even so, 23 of them found the system prompt, which
# the first was only about to compute. How many prompt tokens would be computed if the system prompt had 319 tokens?
# (A prompt then has 335. Its 20th block, the positions 304 to 319, begins in the system prompt; where does it end?)

# %%
tokens_of_319 = None

# %%
scheduler, counts = SharingScheduler(num_blocks=1024, prefix_caching=True), Prefilled()
drive(observe(scheduler, counts), [Request(n, prompt[1:], 1) for n, prompt in enumerate(prompts)])
check(tokens_of_319, counts.num_tokens)

# %% [markdown]
# ## 4. How large must the cache be?
#
# 60 chats, some running at once: each message comes with all that was said before. The part of the prompts' tokens that
# is found, against the blocks that there are; a step takes 20 ms, whatever is in it.

# %% alt="Hit rate in per cent against blocks, from 128 to 8,192, on a logarithmic axis: from 13 it rises to 82 at 1,024 blocks, and stays at a ceiling of 84."
CHATS = ChatWorkload(
    message=LengthDistribution.from_mean(60, 1.0),
    answer=LengthDistribution.from_mean(80, 0.8),
    rate=0.25,
    mean_turns=6,
    pause=20,
    seconds_per_token=0.03,
    max_model_len=1024,
)
SIZES = [128, 256, 512, 1024, 2048, 4096, 8192]


def hit_rate(num_blocks):
    """The part of the prompts' tokens that a cache of so many blocks finds."""
    requests = list(chats(CHATS, 60, seed=0))
    scheduler = PrefixCachingScheduler(num_blocks=num_blocks, prefix_caching=True)
    ServingSimulation(scheduler, FixedCost(0.02), requests).run()
    return sum(r.num_cached_tokens for r in requests) / sum(r.num_prompt_tokens for r in requests)


rates = [hit_rate(size) for size in SIZES]
_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
ax.plot(SIZES, [100 * rate for rate in rates], "o-", color=SHARED)
ax.set_xscale("log", base=2)
ax.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
ax.set(xlabel="blocks of 16 tokens", ylabel="prompt tokens found, %", ylim=(0, 100))
ax.grid(alpha=0.3)
plt.show()
print(", ".join(f"{size}: {rate:.0%}" for size, rate in zip(SIZES, rates, strict=True)))

# %% [markdown]
# From 1,024 blocks on hardly anything is gained: all chats that are going on fit. Below that, a chat whose next message
# takes long is found evicted when it comes. And no memory finds all: each message itself is new.
#
# Try this: set `pause` to 5, and to 100. Which way does the curve move, and why?
#
# ## 5. Four answers, one prompt
#
# `n = 4`: the prompt is computed once, then three forks share its blocks. Blocks in use, step by step, beside four
# requests of their own.


# %% alt="Blocks in use against steps, for four answers to a prompt of 200 tokens. Requests of their own hold 52 blocks at once and grow to 68. Forks hold 13, then 16 after the copies, and grow to 32. The gap stays."
class Blocks(Observer):
    """Notes the blocks in use, and counts copies."""

    def __init__(self):
        self.used, self.num_copies = [], 0

    def on_schedule(self, scheduler, output):
        self.used.append(scheduler.pool.num_used)
        self.num_copies += len(output.blocks_to_copy)


def four_answers(scheduler, num_prompt=200):
    """Answers, and the blocks that they took."""
    blocks = Blocks()
    llm = LLM(model, scheduler=scheduler, observers=[blocks])
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=7, n=4, ignore_eos=True)
    return [
        answer.token_ids for answer in llm.generate([text_tokens(num_prompt, seed=4)], params)
    ], blocks


alone, blocks_alone = four_answers(PagedScheduler(num_blocks=256, max_model_len=512))
forked, blocks_forked = four_answers(SharingScheduler(num_blocks=256, max_model_len=512))
assert alone == forked
_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
ax.plot(blocks_alone.used, color=PLAIN, label="requests of their own")
ax.plot(blocks_forked.used, color=SHARED, label="forks")
ax.set(xlabel="step", ylabel="blocks in use", ylim=(0, None))
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()
print(f"{blocks_forked.num_copies} blocks copied, and the same tokens in all four answers")

# %% [markdown]
# **Question 5.** Three copies: four write into the unfinished block, and the last of them need not copy it. How many
# copies are there with a prompt of 192 tokens, which fills its twelve blocks? (The forks compute the prompt's last
# token again: they need what it predicts.)

# %%
copies_of_192 = None

# %%
_, blocks = four_answers(SharingScheduler(num_blocks=256, max_model_len=512), num_prompt=192)
check(copies_of_192, blocks.num_copies)

# %% [markdown]
# ## 6. Beams
#
# Beams that come from one beam share all of it. Four beams over 80 tokens: blocks in the tables of all beams, and how
# many different ones those are.


# %% alt="Blocks against steps, for four beams. The blocks in all tables grow in a staircase of four at a time, to 32. The different ones rise and fall between 6 and 17: they fall where beams die, and rise where all four write into new blocks."
class Shared(Observer):
    """Notes blocks in all tables, and different ones."""

    def __init__(self):
        self.all, self.different = [], []

    def on_schedule(self, scheduler, output):
        self.all.append(sum(len(request.block_ids) for request in scheduler.running))
        self.different.append(scheduler.pool.num_used)

    @property
    def saved(self):
        """The part of the blocks that sharing saves."""
        return 1 - sum(self.different) / sum(self.all)


def search(width, num_tokens=80):
    """A beam search: its answers, and the blocks that it took."""
    shared = Shared()
    llm = LLM(
        "minigpt", scheduler=SharingScheduler(num_blocks=512, max_model_len=512), observers=[shared]
    )
    params = BeamSearchParams(width, max_tokens=num_tokens, ignore_eos=True)
    [answers] = beam_search(llm, [text_tokens(40, seed=5)], params)
    return answers, shared


answers, shared = search(4)
_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
ax.plot(shared.all, color=PLAIN, label="in all tables")
ax.plot(shared.different, color=SHARED, label="different ones")
ax.set(xlabel="step", ylabel="blocks", ylim=(0, None))
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()
print(f"{shared.saved:.1%} of the blocks saved")
for answer in answers:
    print(f"{answer.score:.4f}  {' '.join(answer.text.split()[12:26])} …")
alike = next(
    n
    for n, tokens in enumerate(zip(*(a.token_ids for a in answers), strict=True))
    if len(set(tokens)) > 1
)
print(f"all four have their first {alike} tokens in common")

# %% [markdown]
# Of 80 tokens most are the same in all four, at the same place, but after another word. What counts is where they first
# differ: from there on every beam needs keys and values of its own, however alike the words are that follow. That is
# the chain of section 1 once more.
#
# **Question 6.** However much k beams have in common, they cannot save more than a part of 1 − 1/k. For which width
# does that bound first exceed 66.3 %, the most that the paper reports?

# %%
width_of_the_bound = None

# %%
check(width_of_the_bound, next(k for k in range(1, 20) if 1 - 1 / k > 0.663))

# %% alt="Blocks saved in per cent against beam width from 1 to 6: from 0 at one beam to about 60 at five and six, below the bound 1 minus 1/k, which goes to 83."
WIDTHS = range(1, 7)
saved = [search(width)[1].saved for width in WIDTHS]
_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
ax.plot(
    WIDTHS,
    [100 * (1 - 1 / width) for width in WIDTHS],
    ":",
    color=color("end"),
    label="the bound, 1 − 1/k",
)
ax.plot(WIDTHS, [100 * part for part in saved], "o-", color=SHARED, label="beam search on MiniGPT")
ax.set(xlabel="beams", ylabel="blocks saved, %", ylim=(0, 100))
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 7. Let it be audited
#
# 40 random loads without a model: prompts that begin alike, small pools, forks, aborts and preemptions. The auditor
# keeps its own book of what every block holds, and looks for a found block with other tokens in it, and for a write into
# a block with two references.

# %%
num_steps = num_forks = num_found = num_preempted = 0
for seed in range(40):
    rng = random.Random(seed)
    scheduler = observe(
        SharingScheduler(
            num_blocks=rng.randint(10, 30), block_size=4, max_num_seqs=6, prefix_caching=True
        ),
        SharingAuditor(),
    )
    beginnings = [[rng.randrange(9) for _ in range(8)] for _ in range(3)]
    for number in range(20):
        prompt = rng.choice(beginnings) + [rng.randrange(9) for _ in range(rng.randint(1, 9))]
        scheduler.add_request(
            Request(number, prompt, rng.randint(1, 12), cache_salt=rng.choice([None, "red"]))
        )
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        num_preempted += len(output.preempted)
        scheduler.update_from_output(
            output, {request_id: rng.randrange(9) for request_id in output.num_scheduled_tokens}
        )
        decoding = [request for request in scheduler.running if request.output_token_ids]
        if decoding and len(scheduler.running) < 6 and rng.random() < 0.2:
            num_forks += 1
            scheduler.fork_request(rng.choice(decoding).request_id, ("fork", seed, num_forks))
        if decoding and rng.random() < 0.05:
            scheduler.abort_request(rng.choice(decoding).request_id)
        num_steps += 1
    scheduler.check()
    num_found += scheduler.stats.num_hit_tokens
print(
    f"{num_steps:,} steps, {num_forks} forks, {num_found:,} tokens found, {num_preempted} preemptions, no complaint"
)
