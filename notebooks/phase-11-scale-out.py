# %% [markdown]
# # Phase 11: a fleet, measured
#
# One router sends 1,000 requests to 1,000 replicas: once each to a replica drawn at random, once by `PowerOfTwoRouter`.
# How many replicas end with no request, with one, with two, …? This notebook measures routing with old information, a
# fleet of real schedulers in simulated time, one hot prompt, and replicas that die in the middle of an answer.

# %% alt="Replicas against requests on them, in two groups of bars. At random: 380 replicas have none, and up to 5 are on one. Two choices: 228 have none, 555 one, 206 two, 11 three, and none has more."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(11, mine=MINE)

import random
from collections import Counter
from dataclasses import replace

from minicache.fleet import PowerOfTwoRouter, ReplicaView, RoutedRequest

ASKED, MANY = RoutedRequest("any", (), 0), 10**6


def deal(choose, size=1000):
    """As many requests as replicas; how many each has in the end."""
    views = [ReplicaView(str(number), 0, MANY) for number in range(size)]
    for _ in range(size):
        number = choose(views)
        views[number] = replace(views[number], num_unfinished=views[number].num_unfinished + 1)
    return Counter(view.num_unfinished for view in views)


rng, router = random.Random(0), PowerOfTwoRouter(seed=0)
dealt = {
    "drawn at random": deal(lambda views: rng.randrange(len(views))),
    "the less busy of two": deal(lambda views: int(router.choose(ASKED, views))),
}
names = [str(load) for load in range(1 + max(map(max, dealt.values())))]
shown = {name: [counts[load] for load in range(len(names))] for name, counts in dealt.items()}
nb.groups(names, shown, "replicas, by their requests", roles=("wasted", "generated"))

# %% [markdown]
# **Question 1.** Four replicas have 0, 1, 2 and 3 unfinished requests. With what probability does the least busy one
# get the next request? And the busiest?

# %%
to_the_idlest = None
to_the_busiest = None

# %%
from itertools import combinations

pairs = list(combinations(range(4), 2))
nb.check(to_the_idlest, sum(min(pair) == 0 for pair in pairs) / len(pairs))
nb.check(to_the_busiest, sum(min(pair) == 3 for pair in pairs) / len(pairs))

# %% [markdown]
# ## 1. Old information
#
# In this simulation, requests also finish. 40 replicas serve one request at a time, each in one second on average, and
# 36 requests a second arrive. The router reads from a board how many requests each replica has; the board is updated at
# intervals. How long does a request take?


# %%
class LeastOfAll:
    """The least busy of all replicas, of equals one at random."""

    def __init__(self, *, seed=0):
        self.rng = random.Random(seed)

    def choose(self, request, replicas):
        least = min(view.num_unfinished for view in replicas)
        return self.rng.choice(
            [each for each in replicas if each.num_unfinished == least]
        ).replica_id


class OneChoice(LeastOfAll):
    """Any replica."""

    def choose(self, request, replicas):
        return self.rng.choice(replicas).replica_id


# %%
import heapq


def mean_seconds(router, age, *, load=0.9, size=40, count=8_000):
    """Mean seconds from arrival to answer, by a board that is `age` seconds old at most."""
    rng, now, updated, total = random.Random(1), 0.0, 0.0, 0.0
    unfinished, free_at, ends = [0] * size, [0.0] * size, []
    board = [ReplicaView(str(number), 0, MANY) for number in range(size)]
    for _ in range(count):
        now += rng.expovariate(load * size)
        while ends and ends[0][0] <= now:
            unfinished[heapq.heappop(ends)[1]] -= 1
        if now - updated >= age:
            updated = now
            board = [ReplicaView(str(number), n, MANY) for number, n in enumerate(unfinished)]
        number = int(router.choose(ASKED, board))
        free_at[number] = max(now, free_at[number]) + rng.expovariate(1.0)
        heapq.heappush(ends, (free_at[number], number))
        unfinished[number] += 1
        total += free_at[number] - now
    return total / count


# %% alt="Mean seconds against the age of the board, 0.125 to 16 seconds. One choice is flat at 6.5. Two choices rise from 2.4 to 5.6. The least busy of all begins below 2, crosses two choices before half a second and one choice at about 3 seconds, and is far above both at 16."
AGES = [2**power for power in range(-3, 5)]
kinds = {"two choices": PowerOfTwoRouter, "least of all": LeastOfAll, "one choice": OneChoice}
curves = {name: [mean_seconds(kind(seed=0), age) for age in AGES] for name, kind in kinds.items()}
nb.lines(AGES, curves, "age of the board, seconds", "mean seconds", doubling=True, yscale="log")

# %% [markdown]
# This is the herd: between two updates, "the least busy" is the same replica for every request. With two choices a
# request takes longer gradually, at worst as long as with one random choice.
#
# **Question 2.** The board is never updated, so all replicas look idle forever. At a load of 0.5, how many seconds does
# a request take on average with two choices? (A single queue with random gaps and times takes 1 / (1 − load).)

# %%
never_updated = None

# %%
nb.check(never_updated, 1 / (1 - 0.5))
print(f"measured: {mean_seconds(PowerOfTwoRouter(seed=0), 10**9, load=0.5):.2f} s")

# %% [markdown]
# ## 2. Where the prefix is
#
# A fleet of four real schedulers runs in simulated time, each with Llama 3 8B on an A100-40GB. There are 80 chats of
# five turns on average, and each prompt repeats the conversation. Three routers get the same requests.

# %%
from minicache.arithmetic.specs import A100_40GB, LLAMA_3_8B
from minicache.fleet import PrefixAffinityRouter, create_router
from minicache.request import Request
from minicache.scheduler import create_scheduler
from minicache.simulator.costs import RooflineCost
from minicache.simulator.fleet import Crash, FleetSimulation
from minicache.simulator.prompts import ChatWorkload, behind_system_prompt, chats
from minicache.simulator.workload import SHAREGPT

COST = RooflineCost(LLAMA_3_8B, A100_40GB)
TALK = ChatWorkload(
    SHAREGPT.prompt,
    SHAREGPT.output,
    rate=1.2,
    mean_turns=5,
    pause=20,
    seconds_per_token=0.03,
    max_model_len=4096,
)


def fleet(router, requests, *, num_blocks=2000, **options):
    """Serve the requests with four replicas."""

    def scheduler():
        settings = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "prefix_caching": True}
        return create_scheduler("chunked", num_blocks=num_blocks, max_model_len=4096, **settings)

    options = {"num_replicas": 4, "max_unfinished": 1000} | options
    return FleetSimulation(router, scheduler, COST, requests, **options).run()


# %% alt="Hit rate and median time to the first token of three routers. Round robin and power of two have hit rates of about 0.3 and times of 57 to 59 milliseconds; prefix affinity has a hit rate of 0.86 and less than half the time."
policies = ("round_robin", "power_of_two", "prefix_affinity")
reports = {name: fleet(create_router(name), chats(TALK, 80, seed=0)) for name in policies}
left, right = nb.panels(1, 2, height=2.2, sharey=True)
hit_rates = {name: report.hit_rate for name, report in reports.items()}
nb.bars(hit_rates, "hit rate", text="{:.2f}", ax=left)
ttft = {name: 1e3 * report.ttft.p50 for name, report in reports.items()}
nb.bars(ttft, "first token, ms (median)", ax=right)

# %% [markdown]
# **Question 3.** Calculate by hand: a chat of six turns, with messages of 100 tokens and answers of 200, goes to
# **three** replicas by round robin. How many prompt tokens are computed in all? (Turn 1 has a prompt of 100 tokens,
# turn 2 of 400, …)

# %%
computed_on_three_in_turn = None


# %%
def computed(replica_of_turn):
    """Prompt tokens that the replicas of a chat's turns have to compute."""
    has, total = Counter(), 0
    for turn, replica in enumerate(replica_of_turn):
        prompt = 100 + 300 * turn
        total += prompt - has[replica]
        has[replica] = prompt + 200
    return total


nb.check(computed_on_three_in_turn, computed("ABCABC"))
print(f"one replica: {computed('AAAAAA'):,}, of {sum(100 + 300 * turn for turn in range(6)):,}")

# %% [markdown]
# ## 3. One hot prompt
#
# Every request begins with the same 512 tokens. Without a bound, all requests go to the replica that has these tokens.
# The next cell varies the router's bound, `max_imbalance`, from 0 to none at all, for the same requests.

# %% alt="TTFT p99 against max_imbalance. From 0 to 8 it is about 0.1 seconds, at 32 it is 0.3; without a bound it is 28 seconds. The busiest replica's share grows from a quarter to all requests."
BOUNDS = {"0": 0, "2": 2, "8": 8, "32": 32, "none": 10**6}
hot = replace(SHAREGPT, rate=16.0, max_model_len=4096)
slowest, share = {}, {}
for name, bound in BOUNDS.items():
    router = create_router("prefix_affinity", max_imbalance=bound)
    report = fleet(router, behind_system_prompt(hot, 512, 300, seed=0))
    slowest[name] = report.ttft.p99
    share[name] = max(each.num_sent for each in report.replicas) / report.num_requests
    print(f"max_imbalance {name:>4}: hit rate {report.hit_rate:.2f}")
left, right = nb.panels(1, 2, height=2.6, sharey=True)
nb.bars(slowest, "first token, s (p99)", text="{:.2f}", ax=left, ylabel="max_imbalance")
nb.bars(share, "share of the busiest replica", text="{:.0%}", ax=right)

# %% [markdown]
# The hit rate is almost the same with all bounds. A hot prompt is soon in every cache; after that, affinity adds
# nothing, and only the load matters.
#
# **Question 4.** With `max_imbalance=8`, by how many unfinished requests can a replica be ahead of the least busy one,
# right after it has been chosen?

# %%
furthest_ahead = None

# %%
router = create_router("prefix_affinity", max_imbalance=8)
at_hand = RoutedRequest("hot", (b"system prompt",), 16)
unfinished = Counter({"a": 0, "b": 0})
ahead = 0
for _ in range(100):  # nothing ends
    views = [ReplicaView(name, count, MANY) for name, count in unfinished.items()]
    name = router.choose(at_hand, views)
    router.on_sent(at_hand, name)
    unfinished[name] += 1
    ahead = max(ahead, abs(unfinished["a"] - unfinished["b"]))
nb.check(furthest_ahead, ahead)

# %% [markdown]
# ## 4. In the middle of an answer
#
# In this toy model, the next token is a function of all tokens before it, as with temperature 0. The replica dies once,
# after any number of tokens, and the stream continues elsewhere. Is the answer always the same?

# %%
from minicache.fleet.failover import FailoverStream


def next_token(token_ids):
    """The likeliest token, as it were."""
    return (7 * sum(token_ids) + len(token_ids)) % 50


def serve(stream, num_until_death=()):
    """Attempt after attempt; the first ones die. Returns how many tokens were computed."""
    num_computed, deaths = 0, iter(num_until_death)
    for name in "ABC":
        attempt = stream.begin(name)
        told, death = list(attempt.prompt_token_ids), next(deaths, None)
        num_computed += len(told)
        for number in range(attempt.max_tokens):
            if number == death:
                break
            told.append(next_token(told))
            num_computed += 1
            stream.receive(attempt, number, told[-1:])
        else:
            stream.finish(attempt, "length", attempt.max_tokens)
            return num_computed
        stream.fail(attempt)
    return num_computed


# %%
PROMPT = list(range(1, 41))
whole = FailoverStream("whole", PROMPT, 30)
serve(whole)
for death in range(31):
    stream = FailoverStream(death, PROMPT, 30)
    serve(stream, [death])
    assert stream.token_ids == whole.token_ids
print("The same 30 tokens, wherever it dies:", whole.token_ids[:8], "…")

# %% [markdown]
# **Question 5.** A request has a prompt of 512 tokens and `max_tokens=300`. The first replica dies after 120 tokens,
# the second after 80 more. How many prompt tokens does the third attempt have, and what is its `max_tokens`?

# %%
prompt_of_the_third = None
max_tokens_of_the_third = None

# %%
stream = FailoverStream("twice unlucky", [1] * 512, 300)
for name, count in (("A", 120), ("B", 80)):
    attempt = stream.begin(name)
    stream.receive(attempt, 0, [2] * count)
    stream.fail(attempt)
attempt = stream.begin("C")
nb.check(prompt_of_the_third, len(attempt.prompt_token_ids))
nb.check(max_tokens_of_the_third, attempt.max_tokens)

# %% [markdown]
# ## 5. A fleet that loses a replica
#
# The load is the hot prompt's again, at 21 requests a second, which four replicas can serve and three cannot. After six
# seconds one dies, and 14 seconds later another replaces it. When does a request that arrives meanwhile get its first
# token?

# %% alt="Time to first token against the time of arrival, a point for each request. Without a death all points are below 0.6 seconds, and nearly all below 0.1. After a death at 6 seconds they rise slowly, to 1.6 seconds for arrivals before second 20, when another replica is there; then they fall to below half a second, and rise again after second 24, where the other run has its highest points too."
busy = replace(hot, rate=21.0)
crash = Crash(6.0, "replica-1", seconds=14.0)


def run_with(crashes):
    """The same requests, and these deaths."""
    requests = behind_system_prompt(busy, 512, 550, seed=0)
    return fleet(create_router("prefix_affinity"), requests, crashes=crashes)


runs = {"a death": run_with([crash]), "no death": run_with([])}
came = {name: run.times.arrival for name, run in runs.items()}
first = {name: run.times.first_token for name, run in runs.items()}
nb.lines(
    came, first, "arrival, s", "time to first token, s", roles=("end", "generated"), joined=False
)
for name, run in runs.items():
    print(
        f"{name}: {run.num_finished} of {run.num_requests} finished, {run.num_resent} sent again,"
    )
    print(f"  {run.num_output_tokens:,} tokens; half have their first after {run.ttft.p50:.2f} s")
assert runs["a death"].num_output_tokens == runs["no death"].num_output_tokens

# %% [markdown]
# Every answer has all of its tokens in both runs; those that the dead replica still had to generate only came later.
# The cost of a failure is not the lost work but the load on the other replicas.

# %% [markdown]
# ## 6. A day, and a start that takes a minute
#
# 20 minutes stand for a day: the rate rises from 0.5 to 8 requests a second and falls again. A request takes ten
# seconds, a new replica a minute to start. The autoscaler aims at eight unfinished requests a replica, and decides
# every five seconds.

# %%
from math import cos, pi

from minicache.fleet import Autoscaler
from minicache.simulator.costs import FixedCost
from minicache.simulator.fleet import Scaling
from minicache.simulator.workload import Arrival

DAY = 1200.0


def rate(seconds):
    """Requests a second."""
    return 0.5 + 7.5 * (1 - cos(2 * pi * seconds / DAY)) / 2


def a_day():
    """Requests of 40 tokens: those of the highest rate, of which some are left out."""
    rng, now = random.Random(0), 0.0
    while (now := now + rng.expovariate(8.0)) < DAY:
        if rng.random() < rate(now) / 8:
            yield Arrival(now, now, 50, 40)


def live(autoscaler):
    """The day, by this autoscaler."""
    scaling = Scaling(autoscaler, interval=5.0, start_seconds=60.0)
    router, cost = create_router("power_of_two"), FixedCost(0.25)
    options = {"num_replicas": 1, "max_unfinished": 16, "scaling": scaling}
    return FleetSimulation(
        router, lambda: create_scheduler("chunked", num_blocks=200), cost, a_day(), **options
    ).run()


# %% alt="Replicas that take requests against minutes, for downscale delays of 0 and 120 seconds, over a day of 20 minutes. Both rise from 1 to about 10 and fall again. Without a delay the curve goes down at every lull, and is lower nearly all day; with 120 seconds it rises in steps, stays at 11 from minute 10 to 15, and falls later."
days = {
    f"downscale_delay {delay}": live(
        Autoscaler(target_unfinished=8, max_replicas=16, upscale_delay=10, downscale_delay=delay)
    )
    for delay in (0, 120)
}
nb.lines(
    {name: [time / 60 for time in run.series.time] for name, run in days.items()},
    {name: run.series.num_ready for name, run in days.items()},
    "minutes",
    "replicas",
    roles=("end", "generated"),
    marks=False,
)
for name, run in days.items():
    print(f"{name}: {len(run.replicas)} replicas, {run.replica_seconds / 3600:.2f} hours of them,")
    print(f"  the slowest hundredth of the first tokens after {run.ttft.p99:.1f} s")

# %% [markdown]
# A fleet that stops replicas at once soon has to start them again, and is a minute behind the load all day. Waiting
# before it stops them costs 29 % more replica hours, and TTFT p99 is half a second instead of nine.
#
# **Question 6.** There are three replicas, and `upscale_delay=20`. At the decisions after 0, 10 and 20 seconds, the
# fleet has 40, 56 and 48 unfinished requests, with a target of 8. How many replicas should there be after the third
# decision?

# %%
replicas_after_20_seconds = None

# %%
from minicache.fleet import FleetView

scaler, state = Autoscaler(target_unfinished=8, upscale_delay=20, downscale_delay=60), {}
for now, unfinished in ((0, 40), (10, 56), (20, 48)):
    number, state = scaler.decide(FleetView(now, 3, 0, unfinished), state)
nb.check(replicas_after_20_seconds, number)

# %% [markdown]
# ## 7. Is a KV cache worth moving?
#
# A prompt of 8,000 tokens for Llama 3 8B is computed on another A100 and sent here, layer by layer. How long does that
# take, depending on the bandwidth of the link?

# %% alt="Seconds against the link's bandwidth in GB/s, from 0.25 to 64. Computed here: flat at 0.69. Computed elsewhere and sent layer by layer: 4.2 seconds at 0.25 GB/s, falling until about 1.5 GB/s, and from there almost the same as computing it here."
from minicache.fleet.disaggregation import MovingCosts

LINKS, TOKENS = [2**power for power in range(-2, 7)], 8000
PER_TOKEN = 2 * LLAMA_3_8B.num_parameters / (0.6 * A100_40GB.peak_flops)
links = [MovingCosts(LLAMA_3_8B, PER_TOKEN, 1e9 * link) for link in LINKS]
curves = {
    "computed elsewhere, and sent": [each.remote_seconds(TOKENS, TOKENS) for each in links],
    "computed here": [each.prefill_seconds(TOKENS) for each in links],
}
nb.lines(LINKS, curves, "bandwidth, GB/s", "seconds", doubling=True, ylim=(0, None))
print(f"break-even: {links[0].break_even_bandwidth() / 1e9:.2f} GB/s")

# %% [markdown]
# Beyond the break-even nearly all of the transfer happens during the computation, and adds little time. The figure does
# not show the gain: the requests that decode here do not wait for the prompt.
#
# **Question 7.** A replica computes 5,000 tokens a second of Llama 3 70B: 80 layers, 8 KV heads of 128, two bytes a
# number. At how many GB/s does the link keep up?

# %%
gigabytes_a_second = None

# %%
from minicache.arithmetic.specs import LLAMA_3_70B

nb.check(
    gigabytes_a_second,
    MovingCosts(LLAMA_3_70B, 1 / 5000, 1e9).break_even_bandwidth() / 1e9,
    within=0.01,
)

# %% [markdown]
# ## Your experiment: how much should a router remember?
#
# There are 48 customers, each with a system prompt of 1,000 tokens, and some are more frequent than others. Four
# replicas with 800 blocks have room for a dozen of these prompts each. The router remembers 100, 400, 800 or 3,200
# blocks of each replica.
#
# **Write down the hit rate that you expect for each of the four capacities**, then run the cell. Then change the bound,
# the number of customers, or let the frequent prompts change every few seconds.

# %% alt="Hit rates for four capacities. With 100 blocks a little below one half, with 400 about 0.7, with 800 and 3,200 about 0.8."
YOUR_CAPACITIES = (100, 400, 800, 3200)
YOUR_BOUND, YOUR_NUM_CUSTOMERS = 8, 48
YOUR_SECONDS = 10**6  # so often the favourites change
YOUR_PREDICTION = "…, …, …, …"


def customers(count=500, rate=20.0):
    """Requests behind the customers' system prompts."""
    rng, now = random.Random(0), 0.0
    prompts = [rng.choices(range(1, 50_000), k=1000) for _ in range(YOUR_NUM_CUSTOMERS)]
    for number in range(count):
        now += rng.expovariate(rate)
        which = int(now / YOUR_SECONDS) * 7 + int(rng.expovariate(4 / YOUR_NUM_CUSTOMERS))
        prompt = prompts[which % YOUR_NUM_CUSTOMERS] + rng.choices(range(1, 50_000), k=100)
        yield Request(number, prompt, 40, ignore_eos=True, arrival_time=now)


found = {}
for blocks in YOUR_CAPACITIES:
    router = PrefixAffinityRouter(max_imbalance=YOUR_BOUND, capacity_blocks=blocks)
    found[f"{blocks:,} blocks"] = fleet(router, customers(), num_blocks=800).hit_rate
nb.bars(found, "hit rate", text="{:.2f}", roles=["shared"])
print("You predicted:", YOUR_PREDICTION)

# %% [markdown]
# **What to look for.** Remembering less than the cache has costs hits: the router sends customers away from replicas
# that still have their prompt. Remembering more costs little as long as the frequent prompts stay the same: a customer
# goes back to where the prompt was, and it is recomputed there. What if the frequent prompts change every few seconds?
