"""Phase 5, task 7: one step of the engine: what to run, what to pick, what to emit."""

from __future__ import annotations

import itertools

import pytest
import torch

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.request import RequestStatus
from minicache.scheduler import ContinuousBatchScheduler, PagedScheduler, StaticBatchScheduler
from minicache_course import scenario
from minicache_course.checks import call, short, that
from minicache_course.follow import following
from minicache_course.seeds import fresh

VOCAB = 60


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(fresh(0))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _engine():
    """A failure shows the engine's options."""

    def told(llm, model, **options):
        return f"LLM({', '.join(['model', *(f'{name}={short(value)}' for name, value in options.items())])})", ""

    with following(LLM, __init__=told):
        yield


@pytest.fixture(scope="module")
def model():
    """A small MiniGPT with random weights, in float64 to avoid near ties.

    Plain random weights repeat the newest token forever. With small embeddings and strong attention, the next token
    depends on all previous ones, so a token in the wrong place shows.
    """
    torch.manual_seed(fresh(3))
    config = MiniGPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=24,
        max_seq_len=64,
    )
    model = MiniGPT(config).double().eval()
    with torch.no_grad():
        model.embed_tokens.weight.mul_(0.05)
        model.norm.weight.mul_(30)
        for layer in model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                part.weight.mul_(6)
    return model


class Letters:
    """A tokenizer: token 0 ends a text, tokens 1 … 59 are one letter each, from "A" on."""

    end_token_id = 0

    def encode(self, text):
        return [ord(letter) - 64 for letter in text]

    def decode(self, ids):
        return "".join(chr(64 + token_id) for token_id in ids if token_id != self.end_token_id)


class Watched:
    """The model, which records the tokens of every forward pass and raises in the passes of `failures`, from 0."""

    def __init__(self, model, failures=()):
        self.model, self.failures, self.passes = model, failures, []
        self.config, self.parameters = model.config, model.parameters

    def __call__(self, token_ids, cache):
        self.passes.append(token_ids.tolist())
        logits = self.model(token_ids, cache)
        if len(self.passes) - 1 in self.failures:
            raise OSError("the device is gone")
        return logits


def prompts_of(*lengths, seed=1):
    generator = torch.Generator().manual_seed(fresh(seed))
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def alone(model, prompt, num_tokens, params=None):
    """The tokens of one request alone, without a cache or an engine."""
    tokens, sampler = list(prompt), None if params is None else TokenSampler(params)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits.argmax()) if sampler is None else sampler.draw(logits))
    return tokens[len(prompt) :]


def greedy(num_tokens, **more):
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


def serve(llm, max_steps=200):
    """Step until nothing is left: request id → its chunks."""
    chunks = {}
    for _ in range(max_steps):
        if not llm.has_unfinished:
            return chunks
        for chunk in call(llm.step).value:
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return that(f"unfinished requests after {max_steps} steps", list(llm.answers)).gives([])


def tokens_of(chunks):
    return [chunk.token_id for chunk in chunks]


# One pass


@pytest.mark.parametrize("cache", ["paged", "dense"])
def test_one_pass_over_all_prompts(model, cache):
    """Prompts of 5, 1 and 9 tokens: one forward pass over 15 tokens, and the logits of each prompt's last token."""
    llm, prompts = LLM(model, cache=cache), prompts_of(5, 1, 9)
    for prompt in prompts:
        llm.add_request(prompt, greedy(4))
    got = call(llm.run_model, llm.scheduler.schedule()).value
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt]))[0] for prompt in prompts]
    for i, rows in enumerate(logits):
        scenario.remember(f"logits of prompt {i}", rows)
    expected = torch.stack([rows[-1] for rows in logits])
    that("logits of three requests", got).is_close(expected, rtol=0, atol=1e-9)
    that("logits.requires_grad: no gradients are kept", got.requires_grad).gives(False)


@pytest.mark.parametrize("cache", ["paged", "dense"])
def test_what_a_pass_computes(model, cache):
    """Each step is one forward pass over the uncomputed tokens: prompts once, then a token a request."""
    watched, (first, second) = Watched(model), prompts_of(4, 6)
    llm, a, b = LLM(watched, cache=cache), alone(model, first, 4), alone(model, second, 2)
    llm.add_request(first, greedy(4))
    call(llm.step)
    llm.add_request(second, greedy(2))
    serve(llm)
    that("tokens of the first pass, a prompt", watched.passes[0]).gives([first])
    that("tokens of the second: a decode, then the new prompt", watched.passes[1]).gives([[a[0], *second]])
    that("tokens of the third: two decodes", watched.passes[2]).gives([[a[1], b[0]]])
    that("tokens of the fourth: who is left", watched.passes[3]).gives([[a[2]]])
    that("passes in all", len(watched.passes)).gives(4)


class Rows(Watched):
    """The model, which records how many rows it projects to the vocabulary."""

    def __init__(self, model):
        super().__init__(model)
        self.hidden_states, self.num_rows = model.hidden_states, 0

    def logits(self, hidden):
        self.num_rows += hidden.numel() // hidden.shape[-1]
        return self.model.logits(hidden)

    def __call__(self, token_ids, cache):
        return self.logits(self.hidden_states(token_ids, cache))


def test_only_the_last_rows_are_multiplied_with_the_vocabulary(model):
    """Prompts of 5, 1 and 9 tokens: 3 rows of logits are made, not 15 (`logits_at`)."""
    rows = Rows(model)
    llm = LLM(rows)
    for prompt in prompts_of(5, 1, 9):
        llm.add_request(prompt, greedy(4))
    call(llm.run_model, llm.scheduler.schedule()).value  # noqa: B018  (.value fails the test if the call raised)
    that("rows of logits in a step of 15 tokens of three requests", rows.num_rows).gives(3)


class Looked(list):
    """A prompt that counts the reads of its tokens."""

    num_read = 0

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, at):
        self.num_read += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)

    def __add__(self, other):
        self.num_read += len(self)
        return super().__add__(other)


def test_a_decode_reads_no_prompt(model):
    """A decode step costs the same after a prompt of 50 as after one of 5: it reads the newest token only."""
    (prompt,) = prompts_of(50)
    llm = LLM(model)
    llm.add_request(prompt, greedy(4))
    (request,) = [answer.request for answer in llm.answers.values()]
    call(llm.step)
    request.prompt_token_ids = Looked(prompt)
    chunks = serve(llm)
    that("tokens of the decode steps", tokens_of(chunks[0])).gives(alone(model, prompt, 4)[1:])
    that("prompt tokens that they have read", request.prompt_token_ids.num_read).gives(0)


def test_without_requests_nothing_is_done(model):
    """Without requests a step moves no block and gives no chunks, and the model is not run."""
    watched = Watched(model)
    llm = LLM(watched)
    call(llm.step).gives([])
    told = "whether the empty step was committed: scheduler.outstanding is None"
    that(told, llm.scheduler.outstanding is None).gives(True)
    llm.generate(prompts_of(3), greedy(2))
    call(llm.step).gives([])
    that("passes", len(watched.passes)).gives(2)


class Moves(ContinuousBatchScheduler):
    """Schedules a copy of a finished request's block in each step."""

    def schedule(self):
        output = super().schedule()
        output.swapped_out["gone"] = [(0, 0)]
        return output


def test_blocks_are_moved_though_nothing_is_scheduled(model):
    """A step swaps a request out and has no tokens to compute: the blocks are moved, and the model is not run."""
    watched, moved = Watched(model), []
    llm = LLM(watched, scheduler=Moves(num_blocks=4))
    llm.memory.move_blocks = lambda output: moved.append(dict(output.swapped_out))
    call(llm.step).gives([])
    that("swapped_out, in the calls of memory.move_blocks", moved).gives([{"gone": [(0, 0)]}])
    that("passes", len(watched.passes)).gives(0)


# Tokens

LENGTHS, NUM_TOKENS = (5, 1, 9, 3, 7), (8, 3, 1, 6, 10)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "continuous"},
        {"scheduler": "static", "max_num_seqs": 2},
        {"scheduler": "continuous", "max_num_seqs": 2, "block_size": 3},
        {"scheduler": "continuous", "cache": "dense", "max_num_seqs": 3},
        {"scheduler": "paged", "num_blocks": 12, "block_size": 2},
        {"scheduler": "paged", "num_blocks": 12, "block_size": 2, "cache": "dense"},
        {"scheduler": "paged", "num_blocks": 12, "block_size": 2, "preemption": "swap", "num_host_blocks": 20},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_each_request_alone(model, options, sampled):
    """Five requests in any batch, under any scheduler, preempted or not: each gets the same tokens as alone."""
    llm, prompts = LLM(model, **options), prompts_of(*LENGTHS)
    params = [greedy(n, temperature=float(sampled), seed=n) for n in NUM_TOKENS]
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    requests = [answer.request for answer in llm.answers.values()]
    chunks = serve(llm)
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        expected = alone(model, prompt, each.max_tokens, each if sampled else None)
        that(f"tokens of request {i}", tokens_of(chunks[i])).gives(expected)
    that("used blocks at the end", llm.scheduler.pool.num_used).gives(0)
    if options["scheduler"] == "paged":
        that("whether a request was preempted", any(request.num_preemptions for request in requests)).gives(True)


def test_requests_that_come_later(model):
    """A request that arrives while others decode gets its tokens, and so do they."""
    llm, prompts = LLM(model, scheduler="continuous"), prompts_of(*LENGTHS)
    got = {i: [] for i in range(len(prompts))}
    for step in range(40):
        if step % 2 == 0 and step // 2 < len(prompts):
            llm.add_request(prompts[step // 2], greedy(NUM_TOKENS[step // 2]), request_id=step // 2)
        for chunk in call(llm.step).value:
            got[chunk.request_id].append(chunk.token_id)
    for i, prompt in enumerate(prompts):
        that(f"tokens of request {i}", got[i]).gives(alone(model, prompt, NUM_TOKENS[i]))


class Chunked(ContinuousBatchScheduler):
    """A scheduler with chunks: at most three tokens of a request in one step."""

    def schedule_tokens(self, request, output):
        output.num_scheduled_tokens[request.request_id] = min(3, request.num_tokens - request.num_computed_tokens)
        output.scheduled.append(request)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_no_token_before_the_prompt_is_computed(model, temperature):
    """A prompt that is computed in chunks gives and draws no token before its last chunk."""
    (prompt,) = prompts_of(8)
    params = greedy(3, temperature=temperature, seed=2)
    watched = Watched(model)
    llm = LLM(watched, scheduler=Chunked(num_blocks=20))
    llm.add_request(prompt, params)
    got = [tokens_of(call(llm.step).value) for _ in range(5)]
    for i, part in enumerate([prompt[:3], prompt[3:6], prompt[6:]]):
        that(f"tokens of pass {i} over the prompt {prompt}, three a step", watched.passes[i]).gives([part])
    expected = alone(model, prompt, 3, params)
    that("tokens of steps 0 … 4", got).gives([[], [], *[[token] for token in expected]])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_no_token_before_all_is_computed_again(model, temperature):
    """After a failed step, 8 + 2 tokens are recomputed in chunks of 3: the third completes the prompt only."""
    (prompt,) = prompts_of(8)
    params = greedy(4, temperature=temperature, seed=2)
    llm = LLM(Watched(model, (4,)), scheduler=Chunked(num_blocks=20))
    llm.add_request(prompt, params)
    got = [tokens_of(call(llm.step).value) for _ in range(4)]
    call(llm.step).raises(OSError)
    got += [tokens_of(call(llm.step).value) for _ in range(5)]
    expected = [[token] for token in alone(model, prompt, 4, params)]
    that("tokens of the steps that did not fail", got).gives([[], [], *expected[:2], [], [], [], *expected[2:]])


def test_tokens_are_sampled_in_one_call(model):
    """pick calls sample once, with the rows of the requests that get a token, and their samplers, in batch order."""
    llm, prompts = LLM(model, scheduler=Chunked(num_blocks=40)), prompts_of(2, 8, 3)
    for prompt in prompts:
        llm.add_request(prompt, greedy(4))
    calls, samplers = [], [answer.sampler for answer in llm.answers.values()]

    def sample(logits, rows, its_samplers):
        calls.append((list(logits.shape), list(rows), [samplers.index(each) for each in its_samplers]))
        return [7] * len(rows)

    llm.sample = sample
    output = llm.scheduler.schedule()
    call(llm.pick, output, call(llm.run_model, output).value).gives({0: 7, 2: 7})
    that("calls of sample: logits, rows, whose samplers", calls).gives([([3, VOCAB], [0, 2], [0, 2])])


class Backwards(ContinuousBatchScheduler):
    """Serves the newest request first, so the batch is not in the order of arrival."""

    def priority_key(self, request):
        return (-request.arrival_index,)


def test_each_request_draws_with_its_own_sampler(model):
    """The batch is not in the order of arrival: each request draws with its seed."""
    llm, prompts = LLM(model, scheduler=Backwards(num_blocks=40)), prompts_of(3, 5, 4)
    params = [greedy(6, temperature=1.0, seed=seed) for seed in range(3)]
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    first, second = (call(llm.step).value for _ in range(2))
    that("whose the chunks of step 1 are, the newest first", [chunk.request_id for chunk in second]).gives([2, 1, 0])
    chunks = serve(llm)
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        got = [chunk.token_id for chunk in (*first, *second, *chunks[i]) if chunk.request_id == i]
        that(f"tokens of request {i}", got).gives(alone(model, prompt, 6, each))


# Chunks


def test_what_a_chunk_says(model):
    """Each token in a separate chunk, in batch order; the last has the finish_reason."""
    llm, prompts = LLM(model, tokenizer=Letters()), prompts_of(3, 5)
    expected = [alone(model, prompt, n) for prompt, n in zip(prompts, (2, 3), strict=True)]
    for prompt, n in zip(prompts, (2, 3), strict=True):
        llm.add_request(prompt, greedy(n), request_id=f"r{n}")
    steps = [[(c.request_id, c.token_id, c.text, c.finish_reason) for c in call(llm.step).value] for _ in range(3)]
    a, b = ([(token, Letters().decode([token])) for token in tokens] for tokens in expected)
    that("step 0", steps[0]).gives([("r2", *a[0], None), ("r3", *b[0], None)])
    that("step 1", steps[1]).gives([("r2", *a[1], "length"), ("r3", *b[1], None)])
    that("step 2", steps[2]).gives([("r3", *b[2], "length")])
    that("answers that are still kept", list(llm.answers)).gives([])


class Signs(Letters):
    """The letters, and an "@" for token 0, which is not an end token."""

    end_token_id = VOCAB

    def decode(self, ids):
        return "".join(chr(64 + token_id) for token_id in ids)


def test_token_0_is_a_token(model):
    """The token with the id 0 is committed and shown like any other."""
    (prompt,) = prompts_of(3)
    llm = LLM(model, tokenizer=Signs())
    llm.sample = lambda logits, rows, samplers: [0] * len(rows)
    llm.add_request(prompt, greedy(2))
    chunks = serve(llm)[0]
    told = [(chunk.token_id, chunk.text, chunk.finish_reason) for chunk in chunks]
    that("tokens, texts and reasons", told).gives([(0, "@", None), (0, "@", "length")])


def test_the_memory_forgets_a_finished_request(model):
    """One of two requests finishes in step 1: memory.forget is called with its id, and later with the other's."""
    llm, prompts = LLM(model), prompts_of(3, 5)
    forget, forgotten = llm.memory.forget, []
    llm.memory.forget = lambda request_id: (forgotten.append(request_id), forget(request_id))
    for prompt, num_tokens in zip(prompts, (2, 4), strict=True):
        llm.add_request(prompt, greedy(num_tokens))
    for step, expected in enumerate([[], [0], [0], [0, 1]]):
        call(llm.step)
        that(f"what memory.forget was called with, up to step {step}", forgotten).gives(expected)


def test_a_stop_token_ends_a_request(model):
    """The token is in the last chunk, the reason is "stop", and the request is in no later batch."""
    watched, (prompt,) = Watched(model), prompts_of(4)
    expected = alone(model, prompt, 6)
    stop = expected[3]
    llm = LLM(watched)
    llm.add_request(prompt, SamplingParams(max_tokens=6, stop_token_ids=(stop,)))
    chunks = serve(llm)[0]
    num_tokens = expected.index(stop) + 1
    that("tokens", tokens_of(chunks)).gives(expected[:num_tokens])
    that("reasons", [chunk.finish_reason for chunk in chunks]).gives([None] * (num_tokens - 1) + ["stop"])
    that("passes", len(watched.passes)).gives(num_tokens)


def test_a_stop_string_ends_a_request(model):
    """The text is cut before the string, the request is finished, and its blocks are free at once."""
    watched, (prompt,) = Watched(model), prompts_of(4)
    text = Letters().decode(alone(model, prompt, 9))
    stop = text[3:5]
    at = text.index(stop)
    llm = LLM(watched, tokenizer=Letters())
    llm.add_request(prompt, greedy(30, stop=stop))
    (request,) = [answer.request for answer in llm.answers.values()]
    chunks = [chunk for _ in range(at + 2) for chunk in call(llm.step).value]
    that("the text", "".join(chunk.text for chunk in chunks)).gives(text[:at])
    that("tokens", tokens_of(chunks)).gives(alone(model, prompt, at + 2))
    that("the last reason", chunks[-1].finish_reason).gives("stop")
    that(f"the request's status after the step that completed the stop string {stop!r}", request.status.name).gives(
        "FINISHED_STOPPED"
    )
    that("used blocks", llm.scheduler.pool.num_used).gives(0)
    that("has_unfinished", llm.has_unfinished).gives(False)


def test_a_stop_string_that_ends_with_the_last_token(model):
    """The max_tokens-th token completes the stop string: the text is stopped, and the reason is "stop"."""
    (prompt,) = prompts_of(4)
    text = Letters().decode(alone(model, prompt, 9))
    stop = text[3:5]
    at = text.index(stop)
    llm = LLM(model, tokenizer=Letters())
    llm.add_request(prompt, greedy(at + 2, stop=stop))
    chunks = serve(llm)[0]
    that("the text", "".join(chunk.text for chunk in chunks)).gives(text[:at])
    that("reasons", [chunk.finish_reason for chunk in chunks]).gives([None] * (at + 1) + ["stop"])


def test_what_is_held_back_comes_with_the_end(model):
    """The text ends with the possible beginning of a stop string: it is shown with the last token."""
    (prompt,) = prompts_of(4)
    text = Letters().decode(alone(model, prompt, 5))
    llm = LLM(model, tokenizer=Letters())
    llm.add_request(prompt, greedy(5, stop=text[-2:] + "?"))
    chunks = serve(llm)[0]
    that("the text", "".join(chunk.text for chunk in chunks)).gives(text)
    that("the last reason", chunks[-1].finish_reason).gives("length")


def test_a_request_that_outgrows_the_memory_ends_without_a_token(model):
    """A request that outgrows the memory finishes without a token: its chunk has token_id None, reason "capacity"."""
    (prompt,) = prompts_of(3)
    llm = LLM(model, scheduler="paged", num_blocks=3, block_size=2)
    forget, forgotten = llm.memory.forget, []
    llm.memory.forget = lambda request_id: (forgotten.append(request_id), forget(request_id))
    llm.add_request(prompt, greedy(20))
    chunks = serve(llm)[0]
    that("tokens", tokens_of(chunks)).gives([*alone(model, prompt, 4), None])
    that("reasons", [chunk.finish_reason for chunk in chunks]).gives([None] * 4 + ["capacity"])
    that("what memory.forget was called with", forgotten).gives([0])
    that("answers that are still kept", list(llm.answers)).gives([])


def test_an_end_without_a_token_shows_what_was_held_back(model):
    """A request that finishes without a token has no new text; held-back text is shown."""
    (prompt,) = prompts_of(3)
    text = Letters().decode(alone(model, prompt, 4))
    llm = LLM(model, scheduler="paged", num_blocks=3, block_size=2, tokenizer=Letters())
    llm.add_request(prompt, greedy(20, stop=text[-1] + "?"))
    chunks = serve(llm)[0]
    that("the text", "".join(chunk.text for chunk in chunks)).gives(text)
    that("the last chunk's token and reason", (chunks[-1].token_id, chunks[-1].finish_reason)).gives((None, "capacity"))


def test_a_chunk_says_whose_it_is(model):
    """The chunks of a stream of three prompts have the index of their prompt."""
    prompts, got = prompts_of(3, 5, 2), {0: [], 1: [], 2: []}
    for chunk in LLM(model).stream(prompts, greedy(4)):
        got[chunk.index].append(chunk.token_id)
    that("tokens by index", got).gives({i: alone(model, prompt, 4) for i, prompt in enumerate(prompts)})


@pytest.mark.parametrize("cache", ["paged", "dense"])
def test_a_name_may_be_used_again(model, cache):
    """Finished requests are removed, from the memory too: a new request with the same id starts from nothing."""
    llm, prompts = LLM(model, cache=cache), prompts_of(3, 12)
    for prompt in prompts:
        llm.add_request(prompt, greedy(3), request_id="again")
        that("tokens", tokens_of(serve(llm)["again"])).gives(alone(model, prompt, 3))


def test_streams_and_steps_do_not_take_each_others_chunks(model):
    """A step serves all requests, and returns the chunks of add_request only: those of a stream go to the stream."""
    llm, prompts = LLM(model), prompts_of(3, 5)
    llm.add_request(prompts[0], greedy(6))
    stream = llm.stream([prompts[1]], greedy(6))
    streamed = [call(next, stream).value]
    stepped = call(llm.step).value
    streamed += stream
    stepped += serve(llm).get(0, [])
    that("tokens of add_request", tokens_of(stepped)).gives(alone(model, prompts[0], 6))
    that("tokens of the stream", tokens_of(streamed)).gives(alone(model, prompts[1], 6))


# Failures


@pytest.mark.parametrize("cache", ["paged", "dense"])
@pytest.mark.parametrize("scheduler", [StaticBatchScheduler, ContinuousBatchScheduler, PagedScheduler])
def test_a_step_that_failed_can_be_tried_again(model, cache, scheduler):
    """The model raises in some steps: step() raises the error, and stepping again gives the same tokens."""
    failures, prompts = (0, 2, 3, 6), prompts_of(5, 2, 7)
    llm = LLM(Watched(model, failures), scheduler=scheduler(num_blocks=40, block_size=4), cache=cache)
    params = [greedy(6, temperature=1.0, seed=seed) for seed in range(3)]
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    got, num_failures = {i: [] for i in range(3)}, 0
    for _ in range(30):
        try:
            for chunk in llm.step():
                got[chunk.request_id].append(chunk.token_id)
        except OSError:
            num_failures += 1
            llm.scheduler.check()
    that("has_unfinished after 30 steps", llm.has_unfinished).gives(False)
    that("OSErrors of the model that came out of step()", num_failures).gives(len(failures))
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        that(f"tokens of request {i}", got[i]).gives(alone(model, prompt, 6, each))


class Capacity(ContinuousBatchScheduler):
    """Finishes the oldest of two requests for lack of memory, when it has two tokens."""

    def schedule(self):
        output = super().schedule()
        oldest = self.running[0]
        if len(self.running) == 2 and len(oldest.output_token_ids) == 2:
            del output.num_scheduled_tokens[oldest.request_id]
            output.scheduled.remove(oldest)
            self.finish_request(oldest.request_id, RequestStatus.FINISHED_CAPACITY)
            output.finished.append(oldest.request_id)
        return output


def test_ends_without_a_token_are_emitted_first(model):
    """One step finishes a request for lack of memory and gives another a token: the finished one comes first."""
    llm, prompts = LLM(model, scheduler=Capacity(num_blocks=40)), prompts_of(3, 4)
    for prompt in prompts:
        llm.add_request(prompt, greedy(9))
    for _ in range(2):
        call(llm.step)
    told = [(chunk.request_id, chunk.token_id, chunk.finish_reason) for chunk in call(llm.step).value]
    that("chunks of step 2", told).gives([(0, None, "capacity"), (1, alone(model, prompts[1], 3)[2], None)])


@pytest.mark.parametrize("part", ["schedule", "move_blocks", "pick", "update_from_output"])
def test_any_part_of_a_step_may_fail(model, part):
    """A part of the second step raises, once: step() raises the error, and stepping again gives the same tokens."""
    prompts = prompts_of(5, 2)
    llm = LLM(model)
    for prompt in prompts:
        llm.add_request(prompt, greedy(4))
    got = {chunk.request_id: [chunk.token_id] for chunk in call(llm.step).value}
    owner = next(each for each in (llm, llm.memory, llm.scheduler) if hasattr(each, part))
    original = getattr(owner, part)

    def fails(*arguments):
        setattr(owner, part, original)
        raise OSError("the device is gone")

    setattr(owner, part, fails)
    call(llm.step).raises(OSError)
    told = f"the batch after {part} has raised: recover() was called"
    that(told, [each.request_id for each in llm.scheduler.running]).gives([])
    for request_id, chunks in serve(llm).items():
        got[request_id] += tokens_of(chunks)
    that("tokens", got).gives({number: alone(model, prompt, 4) for number, prompt in enumerate(prompts)})


def test_ctrl_c_in_a_step(model):
    """KeyboardInterrupt while the model runs: step() raises it, and stepping again gives the same tokens."""
    (prompt,) = prompts_of(5)

    class Interrupted(Watched):
        def __call__(self, token_ids, cache):
            logits = super().__call__(token_ids, cache)
            if len(self.passes) == 2:
                raise KeyboardInterrupt
            return logits

    llm, came_out = LLM(Interrupted(model)), False
    llm.add_request(prompt, greedy(4, temperature=1.0, seed=1))
    got = tokens_of(call(llm.step).value)
    try:
        llm.step()
    except KeyboardInterrupt:
        came_out = True
    that("whether KeyboardInterrupt came out of step()", came_out).gives(True)
    that("the batch after it: recover() was called", [each.request_id for each in llm.scheduler.running]).gives([])
    got += tokens_of(serve(llm)[0])
    that("tokens", got).gives(alone(model, prompt, 4, greedy(4, temperature=1.0, seed=1)))


def test_an_end_is_emitted_though_the_model_fails(model):
    """A request that schedule() has finished is in output.finished once: it gets its chunk although the step fails."""
    llm, prompts = LLM(Watched(model, (2,)), scheduler=Capacity(num_blocks=40)), prompts_of(3, 4)
    for prompt in prompts:
        llm.add_request(prompt, greedy(9))
    for _ in range(2):
        call(llm.step)
    call(llm.step).raises(OSError)
    chunks = call(llm.step).value
    told = [(chunk.request_id, chunk.token_id, chunk.finish_reason) for chunk in chunks]
    that("chunks of the step after the failure", told).gives(
        [(0, None, "capacity"), (1, alone(model, prompts[1], 3)[2], None)]
    )


class Spoilt(Watched):
    """The model, with logits of NaN wherever one token is."""

    def __init__(self, model, spoilt):
        super().__init__(model)
        self.spoilt = spoilt

    def __call__(self, token_ids, cache):
        return super().__call__(token_ids, cache).masked_fill((token_ids == self.spoilt)[..., None], torch.nan)


@pytest.mark.parametrize("cache", ["paged", "dense"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda what: f"temperature {what}")
def test_a_request_without_logits_fails_alone(model, cache, temperature):
    """NaN in one row: that request finishes with "error" and no token; the others get theirs in the same step."""
    params = greedy(4, temperature=temperature, seed=1)
    expected = {request_id: alone(model, prompt, 4, params) for request_id, prompt in ((0, [4, 8, 3]), (2, [9, 6]))}
    spoilt = next(token_id for token_id in reversed(range(VOCAB)) if token_id not in [*expected[0], *expected[2]])
    llm = LLM(Spoilt(model, spoilt), cache=cache)
    for prompt in ([4, 8, 3], [5, 7, spoilt], [9, 6]):
        llm.add_request(prompt, params)
    (request,) = [answer.request for answer in llm.answers.values() if answer.request.prompt_token_ids[-1] == spoilt]
    first = [(chunk.request_id, chunk.token_id, chunk.finish_reason) for chunk in call(llm.step).value]
    that("step 0", first).gives([(0, expected[0][0], None), (1, None, "error"), (2, expected[2][0], None)])
    that("the request's status", request.status.name).gives("FINISHED_ERROR")
    that("its output: no token was committed for it", request.output_token_ids).gives([])
    chunks = serve(llm)
    that("who has chunks in the steps after it", sorted(chunks)).gives([0, 2])
    for request_id in (0, 2):
        that(f"tokens of request {request_id}", tokens_of(chunks[request_id])).gives(expected[request_id][1:])
    that("used blocks", llm.scheduler.pool.num_used).gives(0)


class Illegible(Letters):
    """The letters, but for one token that cannot be decoded."""

    def __init__(self, token_id, error):
        self.token_id, self.error = token_id, error

    def decode(self, ids):
        if self.token_id in (ids := list(ids)):
            raise self.error("no such letter")
        return super().decode(ids)


@pytest.mark.parametrize(("num_tokens", "error"), [(3, UnicodeError), (6, UnicodeError), (6, KeyError)])
def test_a_token_that_cannot_be_decoded_fails_its_request_alone(model, num_tokens, error):
    """The tokenizer raises for the third token of one request, the last or not: it finishes, the other continues."""
    for seed in itertools.count(1):
        prompts = prompts_of(4, 6, seed=seed)
        first, second = (alone(model, prompt, 6) for prompt in prompts)
        bad = first[2]
        if bad not in [*first[:2], *prompts[0], *prompts[1], *second]:
            break
    llm = LLM(model, tokenizer=Illegible(bad, error))
    for prompt, count in zip(prompts, (num_tokens, 6), strict=True):
        llm.add_request(prompt, greedy(count))
    requests = [answer.request for answer in llm.answers.values()]
    chunks = serve(llm)
    that("reasons of the one", [chunk.finish_reason for chunk in chunks[0]]).gives([None, None, "error"])
    that("its tokens: they were generated", tokens_of(chunks[0])).gives(first[:3])
    that("its status", requests[0].status.name).gives("FINISHED_ERROR")
    that("text of the other", "".join(chunk.text for chunk in chunks[1])).gives(Letters().decode(second))
    that("used blocks", llm.scheduler.pool.num_used).gives(0)
