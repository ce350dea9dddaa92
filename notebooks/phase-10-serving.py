# %% [markdown]
# # Phase 10: a server, and its clients
#
# Four clients send a request to one model, each 40 ms after the one before, and read their answers token by token. The
# third client disconnects after 15 tokens. What happens to the others, and to the blocks of the third? The figure below
# shows when the tokens arrive. This notebook shows why the engine needs its own thread, reads what a server writes on
# the wire, watches the blocks of a client that disconnects, fills the waiting queue, and measures a server under an
# open-loop load.

# %% alt="Tokens received against milliseconds, a line for each of four clients. The lines start about 40 ms apart and rise side by side; the third ends at 15 tokens, the others at 60."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(10, mine=MINE)

import asyncio
import time

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams

PROMPT, PARAMS = "Yesterday I", SamplingParams(max_tokens=60, ignore_eos=True)


async def client(number, arrivals):
    await asyncio.sleep(0.04 * number)
    async for _ in await engine.add_request(PROMPT, PARAMS):
        arrivals.append(1e3 * (time.perf_counter() - start))
        if number == 3 and len(arrivals) == 15:
            break  # it hangs up


clients = {f"client {number}": [] for number in range(1, 5)}
async with AsyncEngine(LLM()) as engine:
    start = time.perf_counter()
    await asyncio.gather(*map(client, range(1, 5), clients.values()))
tokens = {name: range(1, 1 + len(arrivals)) for name, arrivals in clients.items()}
nb.lines(clients, tokens, "milliseconds", "tokens received", marks=False)

# %% [markdown]
# ## 1. A heartbeat
#
# One event loop serves all four clients. What if that loop called the engine's `step()` itself? A coroutine sleeps for
# 1 ms at a time and records how late it wakes up, while 48 requests are answered: in one run a coroutine steps, in the
# other the thread of an `AsyncEngine`.

# %%
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


async def beat(late):
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late.append(1e3 * max(time.perf_counter() - due, 1e-5))


async def a_coroutine_steps(llm):
    for _ in range(48):
        llm.add_request(PROMPT, PARAMS)
    while llm.has_unfinished:
        llm.step()
        await asyncio.sleep(0)


async def a_thread_steps(llm):
    async with AsyncEngine(llm) as engine:
        for stream in [await engine.add_request(PROMPT, PARAMS) for _ in range(48)]:
            async for _ in stream:
                pass


# %% alt="How late the beats were: percentage of the beats against milliseconds on a logarithmic axis. When a thread steps, most beats are late by a small part of a step; when a coroutine steps, most are late by several steps."
late = {}
for serve in (a_coroutine_steps, a_thread_steps):
    heart = asyncio.create_task(beat(late.setdefault(serve.__name__.replace("_", " "), [])))
    await serve(LLM())
    heart.cancel()
percents = {name: [100 * n / len(beats) for n in range(len(beats))] for name, beats in late.items()}
beats = {name: sorted(beats) for name, beats in late.items()}
nb.lines(
    beats, percents, "late by, ms", "% of the beats", roles=("end",), marks=False, xscale="log"
)

# %%
from statistics import median

llm, durations = LLM(), []
for _ in range(48):
    llm.add_request(PROMPT, PARAMS)
while llm.has_unfinished:
    start = time.perf_counter()
    llm.step()
    durations.append(1e3 * (time.perf_counter() - start))
print(f"A step takes {median(durations):.1f} ms.")
for name, beats in late.items():
    print(f"Half of the beats are late by {median(beats):.2f} ms or more when {name}.")

# %% [markdown]
# When a coroutine steps, a beat is late by two or three steps. The loop checks its timers once an iteration, and each
# iteration has a step: during the first the millisecond passes, in the second the timer fires, in the third the
# coroutine runs.
#
# The event loop reads bytes, sends them and notices a disconnect. When the beats are late, all of this is late.
#
# ## 2. A server, and what it writes
#
# The next cells run the whole server in a thread of this process, on a free port. Then one request goes over a plain
# socket, which hides nothing of the response.


# %%
import http.client
import json
import threading
from contextlib import contextmanager

from minicache.engine.llm import LLM
from minicache.serving.http.app import create_app
from minicache.serving.http.running import Server


@contextmanager
def a_server(max_num_seqs=16, max_waiting=64):
    """A server on 127.0.0.1: its port and its engine."""
    app = create_app(AsyncEngine(LLM(max_num_seqs=max_num_seqs), max_waiting=max_waiting))
    port, listening = [], threading.Event()
    heard = lambda at: (port.append(at), listening.set())
    server = Server(app, port=0, drain_seconds=1, on_listening=heard)
    thread = threading.Thread(target=server.run)
    thread.start()
    listening.wait(30)
    try:
        yield port[0], app.state.served.engine
    finally:
        server.stop()
        thread.join(30)


def ask(port, max_tokens=8, **options):
    """POST /v1/completions; the response, whose body has not been read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True} | options
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


# %%
with a_server() as (port, _):
    response = ask(port, max_tokens=3)
    print(
        response.status, *(response.headers[name] for name in ("content-type", "transfer-encoding"))
    )
    chunks = []
    while size := int(response.fp.readline(), 16):  # below http.client, which hides HTTP's chunks
        chunks.append(response.fp.read(size))
        response.fp.readline()
for chunk in chunks:
    print(len(chunk), chunk)

# %% [markdown]
# **Question 1.** The answer has three tokens. How many events does the stream have in all?

# %%
num_events = None

# %%
nb.check(num_events, b"".join(chunks).count(b"\n\n"))

# %% [markdown]
# ## 3. Disconnecting
#
# A client asks for 400 tokens, reads 100 events and disconnects. Meanwhile a thread records the number of blocks in use
# every half millisecond.

# %% alt="Blocks in use against milliseconds since the client disconnected. Before, the number climbs by one block every sixteen tokens, to seven or eight; soon after, it falls to none."
taken, stop = [], threading.Event()


def watch(pool):
    while not stop.is_set():
        taken.append((time.perf_counter(), pool.num_used))
        time.sleep(0.0005)


with a_server() as (port, engine):
    watcher = threading.Thread(target=watch, args=[engine.llm.scheduler.pool])
    watcher.start()
    response = ask(port, max_tokens=400, ignore_eos=True)
    for _ in range(2 * 100):  # an event is a line and an empty one
        response.readline()
    left = time.perf_counter()
    response.close()
    time.sleep(0.3)
    stop.set()
    watcher.join()
    still_running = engine.num_unfinished
times, blocks = [1e3 * (at - left) for at, _ in taken], [count for _, count in taken]
free_at = next((at for at, count in zip(times, blocks) if at > 0 and not count), None)
assert free_at is not None
print("answers under way:", still_running)
names = ("ms since the client hung up", "blocks taken")
nb.lines(times, {"": blocks}, *names, marks=False, xlim=(min(times), max(60, 1.2 * free_at)))
print(f"All blocks were free {free_at:.1f} ms after it hung up.")

# %% [markdown]
# The time until the blocks are free has three parts: the event loop sees that the socket was closed; the running step
# ends; the engine aborts the request.
#
# **Question 2.** The prompt has 2 tokens, and 100 tokens had arrived when the client disconnected. With blocks of 16,
# how many blocks did the request hold? (The figure shows the same, if the engine was not far ahead of the client.)

# %%
blocks_held = None

# %%
nb.check(blocks_held, -(-(2 + 100) // 16))

# %% [markdown]
# ## 4. The waiting queue
#
# The server has two batch slots and a waiting queue of two. Of six clients, the last two get a 429 at once.

# %%
with a_server(max_num_seqs=2, max_waiting=2) as (port, engine):
    responses = []
    for number in range(1, 7):
        start = time.perf_counter()
        response = ask(port, max_tokens=300, ignore_eos=True)
        milliseconds = 1e3 * (time.perf_counter() - start)
        responses.append(response)
        print(f"client {number}: {response.status} after {milliseconds:.1f} ms")
        if response.status != 200:
            message = json.loads(response.read())["error"]["message"]
            print(f"  Retry-After: {response.headers['retry-after']}, {message}")
    statuses = [response.status for response in responses]
    for response in responses:
        response.close()
assert statuses == [200] * 4 + [429] * 2

# %% [markdown]
# **Question 3.** A server has four batch slots and a waiting queue of three. Two requests with `n=2` and one with `n=1`
# are in flight, and four more arrive with `n=1`. How many of the four are refused?

# %%
num_refused = None

# %%
nb.check(num_refused, 4 - (4 + 3 - (2 * 2 + 1)))

# %% [markdown]
# ## 5. An open-loop load
#
# `minicache bench serve`, in another process, sends requests with Poisson arrivals, whether or not earlier ones were
# answered. First it sends 48 at once, to measure the server's maximum rate; then it sends others at fractions of that
# rate, from 0.3 to 2. The server has 16 batch slots and, at the fractions, a waiting queue of 16; the prompts have 24
# tokens, the answers 48.


# %%
import re
import subprocess
import sys


def bench(port, *options):
    """What `minicache bench serve --json` reports."""
    command = [sys.executable, "-c", "from minicache_cli import app; app()", "bench", "serve"]
    command += ["--url", f"http://127.0.0.1:{port}", "--json", "--num-output-tokens", "48"]
    command += map(str, options)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["report"]


def metrics(port):
    """The samples of /metrics without their labels, summed by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text, samples = connection.getresponse().read().decode(), {}
    for name, value in re.findall(r"^(\w[\w:]*)(?:\{.*\})? (\S+)$", text, re.M):
        samples[name] = samples.get(name, 0.0) + float(value)
    return samples


# %%
PARTS, NUM_REQUESTS, reports = (0.3, 0.6, 0.9, 2.0), (12, 30, 60, 120), []
with a_server(max_num_seqs=16, max_waiting=48) as (port, _):
    at_most = bench(port, "--num-requests", 48)["requests_per_second"]
with a_server(max_num_seqs=16, max_waiting=16) as (port, engine):
    for part, num_requests in zip(PARTS, NUM_REQUESTS):
        rate = f"{part * at_most:.3f}"
        reports.append(bench(port, "--rate", rate, "--num-requests", num_requests))
    counted = metrics(port)
print(f"At once: {at_most:.0f} requests a second.")
print("part of it   answered   refused   TTFT p50, p99 in ms   TPOT p50, p99 in ms")
for part, report in zip(PARTS, reports):
    ttft, tpot = ([1e3 * report[what][p] for p in ("p50", "p99")] for what in ("ttft", "tpot"))
    print(f"{part:10.1f} {report['num_ok']:10} {report['num_refused']:9}", end="")
    print(f"   {ttft[0]:9.1f} {ttft[1]:9.1f}   {tpot[0]:10.2f} {tpot[1]:9.2f}")

# %% alt="Two panels against the rate as a fraction of the server's maximum. The time to the first token is short at low rates, and many times as long at twice the maximum, where requests wait in the queue. The time per output token grows with the batch, which has 16 batch slots at most."
for ax, what in zip(nb.panels(1, 2), ("ttft", "tpot")):
    curves = {p: [1e3 * report[what][p] for report in reports] for p in ("p50", "p99")}
    names = ("rate, as a part of what it can do", f"{what.upper()}, ms")
    nb.lines(PARTS, curves, *names, ax=ax, ylim=(0, None), xlim=(0, None))

# %% [markdown]
# In the last row requests arrive faster than they are answered. The batch and the waiting queue hold 32 of them. After
# that, a request that finds the queue full gets a 429 at once: the column *refused* counts such requests. An admitted
# one waits until at most 16 others have finished. Without a limit the wait would grow for as long as the overload
# lasts.
#
# The rate with all 48 at once is not quite the server's rate for requests that arrive one by one: their prefills run
# while others decode. So a request may be refused in an earlier row, too.
#
# **Question 4.** Little's law: a server answers 60 requests a second, each 0.4 s after it arrived. How many requests
# are in flight, on average?

# %%
under_way = None

# %%
nb.check(under_way, round(60 * 0.4))

# %% [markdown]
# The cell does the same for your measurement at the second rate: it multiplies the answered requests a second by their
# mean latency.

# %%
report = reports[1]
rate, latency = report["requests_per_second"], report["latency"]["mean"]
print(f"{rate:.1f} a second · {latency:.3f} s = {rate * latency:.1f} in flight on average")

# %% [markdown]
# ## 6. What the server reports
#
# After the four loads, `/metrics` has the same counts as the clients.

# %%
num_ok, num_turned_away = (sum(r[name] for r in reports) for name in ("num_ok", "num_refused"))
print(f"the clients: {num_ok} answers, {num_turned_away} refusals, {48 * num_ok:,} tokens")
expected = {
    "vllm:request_success_total": num_ok,
    "minicache:requests_refused_total": num_turned_away,
    "vllm:generation_tokens_total": 48 * num_ok,
}
for name, number in expected.items():
    print(f"{name} {counted[name]:,.0f}")
    assert counted[name] == number

# %% [markdown]
# **Question 5.** A histogram has a sum and a count. The count of `vllm:time_to_first_token_seconds` rises by one for
# each answer. By how much does that of `vllm:inter_token_latency_seconds` rise for an answer of 48 tokens?

# %%
gaps_of_an_answer = None

# %%
nb.check(gaps_of_an_answer, round(counted["vllm:inter_token_latency_seconds_count"] / num_ok))

# %% [markdown]
# The server's mean time to the first token is a little below the clients': the server counts from when the engine gets
# the request until the engine generates the token. The difference is the way over HTTP, there and back.

# %%
seconds, count = (counted[f"vllm:time_to_first_token_seconds_{each}"] for each in ("sum", "count"))
client_side = sum(report["ttft"]["mean"] * report["num_ok"] for report in reports) / num_ok
print(f"mean TTFT: {1e3 * seconds / count:.1f} ms in the server, ", end="")
print(f"{1e3 * client_side:.1f} ms at the clients")

# %% [markdown]
# ## 7. On a real model
#
# Four clients ask SmolLM2-135M-Instruct a question each, and read its answer as it is generated. Is the time to the
# first token the same for all four? Which answer is complete first?

# %%
real_model = nb.real_model()


async def ask(engine, question):
    messages = [{"role": "user", "content": question}]
    token_ids = engine.llm.tokenizer.apply_chat_template(messages)
    start, times, text = time.perf_counter(), [], ""
    async for chunk in await engine.add_request(token_ids, SamplingParams(max_tokens=32)):
        times.append(time.perf_counter() - start)
        text += chunk.text
    print(f"first token after {times[0]:.2f} s, the last after {times[-1]:.2f} s: {text}")


if real_model is not None:
    questions = "Why is the sky blue?", "Who wrote Hamlet?", "What is 12 times 12?", "Name a star."
    async with AsyncEngine(LLM(real_model, num_blocks=64)) as engine:
        await asyncio.gather(*(ask(engine, question) for question in questions))

# %% [markdown]
# ## Your experiment: how long a waiting queue?
#
# Under twice the load that it can answer, a server must refuse half of the requests. What is a long waiting queue good
# for?
#
# Choose limits for the queue and a load. **Write down for the smallest and the largest limit how many of the requests
# are refused, and how long an admitted one waits for its first token**, then run the cell. Then try `YOUR_LOAD = 0.9`.

# %% alt="Two panels against the limit of the waiting queue. Refused requests fall as the queue grows; the time to the first token of the admitted ones, median and 99th percentile, rises with it."
YOUR_LIMITS = [1, 4, 16, 64]  # max_waiting
YOUR_LOAD = 2.0  # times what the server can do
YOUR_NUM_REQUESTS = 160
YOUR_PREDICTION = "refused …, ms …"

found = []
for limit in YOUR_LIMITS:
    with a_server(max_num_seqs=16, max_waiting=limit) as (port, _):
        rate = f"{YOUR_LOAD * at_most:.3f}"
        found.append(bench(port, "--rate", rate, "--num-requests", YOUR_NUM_REQUESTS))
refused = {"": [report["num_refused"] for report in found]}
waits = {p: [1e3 * report["ttft"][p] for report in found] for p in ("p50", "p99")}
left, right = nb.panels(1, 2)
look = {"doubling": True, "ylim": (0, None)}
nb.lines(YOUR_LIMITS, refused, "max_waiting", "refusals", roles=["end"], ax=left, **look)
nb.lines(YOUR_LIMITS, waits, "max_waiting", "TTFT of the others, ms", ax=right, **look)
for limit, report in zip(YOUR_LIMITS, found):
    print(f"max_waiting {limit:3}: {report['requests_per_second']:.0f} answers a second")
print("You predicted:", YOUR_PREDICTION)

# %% [markdown]
# **What to look for.** The run is a short burst of 160 requests. A longer queue admits more of it: fewer refusals, and
# a longer wait for every admitted request. If the same load lasted for an hour, the longest queue would be full after
# seconds too. From then on it would refuse half of the requests, as with every other limit, and only the longer wait
# would remain. A queue is there for bursts that end. What is the longest wait that your users would accept, and which
# limit follows?
