# %% [markdown]
# # Phase 12: production defaults, measured
#
# A prefix has left the cache of an H100. Should it be computed again, or read from a disk that kept it? That depends on
# two speeds: how fast the model computes a token's keys and values, and how fast their bytes arrive. This notebook
# measures when it pays to schedule one step ahead, to give blocks back, to keep blocks below the prefix cache, and what
# it costs to allow only some tokens.

# %% alt="Four bars: the GB/s from which on reading a prefix is faster than computing it on an H100. OPT-13B 31.5, Llama-3-8B 8.1, Llama-3-70B 2.3, Qwen3-32B 4.0."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(12, mine=MINE)

from minicache.arithmetic.arithmetic import cache_bytes_per_token
from minicache.arithmetic.specs import H100, LLAMA_3_8B, LLAMA_3_70B, OPT_13B, QWEN3_32B


def bandwidth_needed(model):
    """Bytes a second of which reading and computing a token take the same time."""
    tokens_per_second = H100.peak_flops / (2 * model.num_parameters)
    return tokens_per_second * cache_bytes_per_token(model)


models = {
    "OPT-13B": OPT_13B,
    "Llama-3-8B": LLAMA_3_8B,
    "Llama-3-70B": LLAMA_3_70B,
    "Qwen3-32B": QWEN3_32B,
}
needed = {name: bandwidth_needed(model) / 1e9 for name, model in models.items()}
nb.bars(needed, "GB/s from which on reading wins", text="{:.1f}", roles=["shared"])

# %% [markdown]
# ## 1. One step ahead
#
# Request *a* has a prompt of 4 tokens; its second token is a stop token. Request *b* waits for the blocks of *a*. In
# each iteration the engine schedules a step, and then commits the step before. The sign ? is a placeholder for a token
# that is not committed yet.

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
        names = [each.request_id for each in finished]
        print(f"  commit {number - 1}: {token_ids}; finished: {names}")
    before = output

# %% [markdown]
# What does one step ahead gain? A simulated H100 with Llama-3-8B serves 256 requests, 64 at a time. Every answer ends
# with a stop token. The scheduler is the real one; a step takes the GPU the time of its roofline, and the CPU a fixed
# time for schedule and commit. `seconds_of` puts both on one clock.

# %%
import random

from minicache.arithmetic.specs import LLAMA_3_8B
from minicache.simulator.costs import RooflineCost, StepLoad

cost = RooflineCost(LLAMA_3_8B, H100, overhead_seconds=0.0)


def gpu_seconds(scheduler, num_tokens, overlaps):
    """What each step takes on the GPU, and how many tokens were computed in vain."""
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


# %%
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


# %% alt="How many times as fast one step ahead is, against the CPU's share of a step without overlap, from 0 to 70 %. The formula, the longer of the two, rises from 1 to 2 at 50 % and falls again. Answers of about 200 tokens lie almost on it. Answers of about 10 tokens lie 9 to 17 % below it, and below 1 where the CPU's share is less than 10 %."
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
# Short answers gain less: each costs a step in vain, and frees its batch slot one step later.
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
# A request has 8,000 prompt tokens and 192 generated ones, in Gemma 3 1B: four layers see all tokens, and 22 see the
# last 512. First all layers keep all tokens; then the layers form seven groups of at most four, with prompts in chunks
# of 512 tokens and of 2,048. How much memory does the request hold?

# %% alt="MiB of KV cache against tokens that are scheduled, up to 8,192. One table for all layers rises in a straight line to 208. With groups the request holds 44 at the end; in chunks of 512 it reaches 54 before that, in chunks of 2,048 about 87."
from minicache.request import Request
from minicache.scheduler import create_scheduler


def held(windows, kib, budget=512, prompt=8000, generated=192):
    """Tokens of a request, and the MiB of its blocks of `kib` KiB, after each step."""
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
# A chunk makes every window hold what the chunk's first token sees and the chunk itself. In decode only what the four
# full layers hold goes on growing.
#
# **Question 3.** Gemma 3 4B has 34 layers, 5 of them full; the windows have 1,024 tokens, and a layer stores 4 KiB a token.
# How many MiB does a request of 8,192 tokens hold, in groups of five layers?

# %%
mib_of_4b = None

# %%
nb.check(mib_of_4b, round(held((None,) + (1024,) * 6, 16 * 4 * 5)[1][-1]))

# %% [markdown]
# The next cell is about prefixes. Three prompts of 4,000 tokens begin with the same 3,000. How many tokens does each
# compute, if the windows keep only what a prompt's end needs (`retention` 0), or all blocks (None)?


# %%
def computed(retention, common=3000, length=4000):
    """The tokens that each of three prompts computes, and how many blocks are cached then."""
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
# Keeping all blocks is best for the second prompt and costs more blocks, which in a full pool evict those of other
# prompts.
#
# **Question 4.** With a retention of 1,024, the windows also keep what every multiple of 1,024 tokens needs. How many tokens
# does the second prompt compute?

# %%
second_with_1024 = None

# %%
nb.check(second_with_1024, computed(1024)[0][1])

# %% [markdown]
# ## 3. Below the prefix cache
#
# A conversation of 1,024 tokens is in a folder, and its next prompt arrives while another request decodes. The model
# computes 800 tokens a second, and a token has 46,080 bytes: SmolLM2 on one thread of a CPU. Time is simulated, the
# scheduler is real.

# %%
from minicache.request import Request

RATE, TOKEN_NBYTES, BLOCK = 800, 46_080, 16


class Arriving:
    """A load whose blocks come one after the other, from now on."""

    def __init__(self, tiers, num_blocks):
        self.tiers, self.num_blocks, self.start = tiers, num_blocks, tiers.now

    @property
    def blocks(self):
        come = (self.tiers.now - self.start) * self.tiers.bandwidth
        return [b""] * min(self.num_blocks, int(come / (BLOCK * TOKEN_NBYTES)))

    @property
    def is_done(self):
        return len(self.blocks) == self.num_blocks


class SlowFolder:
    """It has everything, and delivers so many bytes a second; none if the bandwidth is 0."""

    def __init__(self, bandwidth):
        self.bandwidth, self.now = bandwidth, 0.0

    def fetch(self, hashes):
        return Arriving(self, len(hashes) if self.bandwidth else 0)

    def give_up(self, load): ...
    def touch(self, hashes): ...
    def discard(self, hashes): ...


# %%
def serve(bandwidth):
    """Seconds to the conversation's first token, and the other request's longest wait."""
    folder, longest = SlowFolder(bandwidth), 0.0
    scheduler = create_scheduler("chunked", num_blocks=1000, block_size=BLOCK, tiers=folder)
    scheduler.add_request(Request("other", [1, 2, 3], 100_000))
    scheduler.add_request(talk := Request("conversation", list(range(1040)), 2))
    while not talk.output_token_ids:
        output = scheduler.schedule()
        seconds = output.total_num_scheduled_tokens / RATE
        folder.now, longest = folder.now + seconds, max(longest, seconds)
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    return folder.now, longest


# %% alt="Seconds to the first token against bandwidth over break-even, 0.25 to 16, both logarithmic. Computed: level at 1.3. From the folder: falls from 5.1 at 0.25 through 1.3 at 1 to 0.1 at 16."
break_even = RATE * TOKEN_NBYTES
TIMES = [0.25, 0.5, 1, 2, 4, 8, 16]
computed, wait_of_computed = serve(0)
loaded = [serve(times * break_even) for times in TIMES]
curves = {
    "from the folder": [seconds for seconds, _ in loaded],
    "computed": [computed] * len(TIMES),
}
nb.lines(
    TIMES,
    curves,
    "bandwidth / break-even",
    "seconds to the first token",
    doubling=True,
    yscale="log",
)
print(
    f"The other request waits for a token for at most {wait_of_computed:.2f} s, if it is computed;"
)
print(f"for {max(wait for _, wait in loaded):.2f} s at every bandwidth, if it is loaded.")

# %% [markdown]
# A slow folder delays only the conversation, which waits in the queue while the other request goes on. A stack of tiers
# ends a load after three seconds; here a load may take any time.
#
# **Question 5.** What is the break-even bandwidth in MB/s? (1 MB is 10⁶ bytes.)

# %%
break_even_mb = None

# %%
nb.check(break_even_mb, RATE * TOKEN_NBYTES / 1e6, within=0.02)

# %% [markdown]
# A folder has room for 100 blocks, and there are 13 conversations of 8 blocks, one after the other. A full folder
# evicts a twentieth of its bound at once. When a conversation is over, `touch` marks its blocks as used. With `touch`
# and without it, how many blocks long is the prefix that the folder has of each conversation?

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

from minicache.tiers.disk import DiskTier


def prefixes(touches):
    """For each conversation, the blocks of the longest prefix that is left."""
    keys = [[bytes([talk, block]) * 16 for block in range(8)] for talk in range(13)]
    with TemporaryDirectory() as folder:
        tier = DiskTier(Path(folder), 100_000)
        for talk in keys:
            for key in talk:
                tier.store(key, bytes(1000))
            if touches:
                tier.touch(talk)
        return [tier.lookup(talk) for talk in keys]


print("with touch:   ", prefixes(True))
print("without touch:", prefixes(False))

# %% [markdown]
# If blocks are evicted in the order in which they were stored, the beginning of a prefix goes first, and its end is
# kept in vain.
#
# **Question 6.** A folder has room for 4 GB, and keeps nothing but conversations of 1,024 tokens of SmolLM2. How many
# fit?

# %%
num_conversations = None

# %%
nb.check(num_conversations, 4 * 10**9 // (1024 * TOKEN_NBYTES))

# %% [markdown]
# ## 4. Only what is allowed
#
# The vocabulary is made up, and has 38,746 tokens: all bytes, and numbers and groups of two and three letters, with and
# without a space before them. An answer is held to an expression with a name and a number. The plot shows for each
# token of the answer how many tokens are allowed there, and how often the automaton is asked to find them.

# %%
from itertools import product
from string import ascii_lowercase

from minicache.structured.regex import Automaton
from minicache.structured.token_masks import TokenMasks, TokenTrie

groups = [
    "".join(letters) for count in (2, 3) for letters in product(ascii_lowercase, repeat=count)
]
numbers = [str(number) for number in range(10, 1000)]
texts = [space + text for space in ("", " ") for text in groups + numbers]
texts += ['{"', '": "', '", "', '":', '"}']
tokens = [b"", *(bytes([byte]) for byte in range(256)), *map(str.encode, texts)]
trie = TokenTrie(tokens)
ids = {text: token_id for token_id, text in enumerate(tokens)}


# %% alt="Along the 14 tokens of an answer, on a logarithmic axis: tokens allowed, and calls of the automaton. Both are at most about 100 at the fixed text and at the number; in the five steps inside the name 36,500 tokens are allowed, and the automaton is asked 1,400 times."
class Counted(Automaton):
    """Counts how often it is asked."""

    num_asked = 0

    def next_states(self, state):
        self.num_asked += 1
        return super().next_states(state)


def along(expression, answer):
    """For each token of an answer: how many are allowed, how often the automaton is asked."""
    masks, found = TokenMasks(Counted(expression), trie, [0]), []
    state = masks.automaton.start
    for text in answer:
        masks.automaton.num_asked = 0
        found.append((len(masks.allowed(state)), masks.automaton.num_asked))
        state = masks.advance(state, ids[text.encode()])
    return found


expression = r'\{"name": "[a-z ]{1,24}", "age": (0|[1-9]\d?)\}'
name = ["{", '"', "nam", "e", '": "', "ada", " lo", "vel", "ace", '", "']
answer = [*name, "age", '":', " 36", "}"]
allowed, asked = zip(*along(expression, answer))
print(f"{len(tokens):,} tokens, {len(trie.children):,} nodes")
for text, its_allowed, its_asked in zip(answer, allowed, asked):
    print(f"{text:>5}: one of {its_allowed:6,} tokens, the automaton asked {its_asked:5,} times")
curves = {"tokens allowed": allowed, "the automaton is asked": asked}
nb.lines(range(len(answer)), curves, "tokens of the answer so far", "", yscale="log")

# %% [markdown]
# Where little is allowed, little is looked at. Inside the name nearly every token is allowed, and has to be
# listed. The automaton is asked once for each beginning that longer tokens share.
#
# **Question 7.** After `"age":` come a space and a number. Count by hand: how many of the tokens are allowed there?

# %%
allowed_before_the_number = None

# %%
nb.check(allowed_before_the_number, allowed[answer.index(" 36")])

# %% [markdown]
# The next cells run a batch. MiniGPT continues "Yesterday my sister" at temperature 4, in sixteen rows: eight are free,
# eight are held to its grammar. `SentenceMasks` gives the tokens that the parser would accept next, `mask_rows` rules
# out the others.

# %%
import torch

from minicache.engine.masking import mask_rows
from minicache.errors import UngrammaticalError
from minicache.grammar import Tokenizer, check_text
from minicache.model import load_minigpt
from minicache.structured.sentences import SentenceMasks

model, tokenizer = load_minigpt(), Tokenizer()
masks, torch_rng = SentenceMasks(tokenizer), torch.Generator().manual_seed(0)
prompt = tokenizer.encode("Yesterday my sister")
batch, ended = [list(prompt) for _ in range(16)], [False] * 16
for _ in range(16):
    with torch.inference_mode():
        logits = model(torch.tensor(batch))[:, -1] / 4.0
    may = torch.zeros(8, tokenizer.vocab_size, dtype=torch.bool)
    for number, text in enumerate(batch[8:]):
        may[number, list((0,) if ended[8 + number] else masks.allowed(text))] = True
    picked = torch.multinomial(
        mask_rows(logits, range(8, 16), may).softmax(-1), 1, generator=torch_rng
    )
    for number, token_id in enumerate(picked.flatten().tolist()):
        ended[number] |= token_id == tokenizer.end_token_id
        batch[number].append(token_id)


# %%
def is_grammatical(text):
    """Whether a text, which may break off, is MiniGPT's English."""
    try:
        check_text(tokenizer.decode_words(text), unfinished=True)
    except UngrammaticalError:
        return False
    return True


for name, its_texts in (("free", batch[:8]), ("held", batch[8:])):
    its_texts = [text[: text.index(0)] if 0 in text else text for text in its_texts]
    print(f"{name}: {sum(map(is_grammatical, its_texts))} of 8 are grammatical, such as")
    print("  ", " ".join(tokenizer.decode_words(its_texts[0])))

# %% [markdown]
# **Question 8.** In one row of the batch, two tokens are allowed. The model gives them probabilities of 0.02 and 0.06.
# With what probability is the second one picked after masking?

# %%
probability_of_the_second = None

# %%
row = torch.tensor([[0.02, 0.06, 0.92]]).log()
right = mask_rows(row, [0], torch.tensor([[True, True, False]])).softmax(-1)[0, 1]
nb.check(probability_of_the_second, round(float(right), 2))

# %% [markdown]
# ## Your experiment: whose answers gain by one step ahead?
#
# This is the server of section 1 again: 256 requests, 64 at a time, on a simulated H100. The CPU has a fifth of each
# step, and by the rule of the longer of the two, one step ahead is at most 1.25 times as fast.
#
# **Write down how many times as fast it is for each of the four lengths**, then run the cell. Then change the CPU's
# share: from which share on does one step ahead pay for all four lengths?

# %% alt="How many times as fast one step ahead is, for four lengths of answers. 1.11 for 2 tokens, 1.16 for 5, 1.19 for 20, 1.24 for 200."
YOUR_LENGTHS = (2, 5, 20, 200)  # tokens of an answer, on average
YOUR_SHARE = 0.2  # of a step without overlap: the CPU's
YOUR_PREDICTION = "…, …, …, …"

gains = {}
for num_tokens in YOUR_LENGTHS:
    in_turn, _ = gpu_seconds(ChunkedPrefillScheduler(**options), num_tokens, overlaps=False)
    ahead, _ = gpu_seconds(AsyncChunkedScheduler(**options), num_tokens, overlaps=True)
    cpu = YOUR_SHARE / (1 - YOUR_SHARE) * sum(in_turn) / len(in_turn)
    gains[f"{num_tokens} tokens"] = seconds_of(in_turn, cpu, overlaps=False) / seconds_of(
        ahead, cpu, overlaps=True
    )
nb.bars(gains, "times as fast", text="{:.2f}", roles=["generated"])
print("You predicted:", YOUR_PREDICTION)

# %% [markdown]
# **What to look for.** Each answer costs one token in vain, and its batch slot is free one step later. For an answer of
# 2 tokens that is a third of its steps; for one of 200, next to nothing. If the CPU has a twentieth of a step, short
# answers lose: chats and documents gain, and a classifier that answers with one word may not.
