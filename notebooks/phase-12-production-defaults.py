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

# %% [markdown]
# ## 3. Below the prefix cache
#
# A conversation of 1,024 tokens is in a folder, and its next prompt arrives while another request decodes. The model
# computes 800 tokens a second, and a token has 46,080 bytes: SmolLM2 on one thread of a CPU. Time is simulated, the
# scheduler is real.

# %%
from minicache.request import Request
from minicache.scheduler import create_scheduler

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


def serve(bandwidth):
    """Seconds to the conversation's first token, and the other request's longest wait for a token."""
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


# %% alt="Seconds to the first token against bandwidth over break-even, 0.25 to 16, both logarithmic. Computed: level at 1.3. From the folder: falls from 5.1 at 0.25 over 1.3 at 1 to 0.1 at 16."
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
# A slow folder delays the conversation and no other request: it waits in the queue, and the other request goes on. A stack of
# tiers ends a load after three seconds; here it may take as long as it likes.
#
# **Question.** What is the break-even bandwidth in MB/s? (1 MB is 10⁶ bytes.)

# %%
break_even_mb = None

# %%
nb.check(break_even_mb, RATE * TOKEN_NBYTES / 1e6, within=0.02)

# %% [markdown]
# A folder for 100 blocks, and 13 conversations of 8 blocks, one after the other. When a conversation is over, its blocks
# count as used, `touch`. With and without that: of how many blocks does the folder have a prefix, for each conversation?

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
# In the order in which they were stored, the beginning of a prefix goes first, and its end is kept in vain.
#
# **Question.** A folder has 4 GB, and nothing but conversations of 1,024 tokens of SmolLM2. How many can it have?

# %%
num_conversations = None

# %%
nb.check(num_conversations, 4 * 10**9 // (1024 * TOKEN_NBYTES))

# %% [markdown]
# ## 4. Only what is allowed
