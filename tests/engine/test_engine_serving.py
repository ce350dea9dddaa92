"""The engine as its callers see it: where answers end, what is streamed, what is refused, and what a failure costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tests.grid import grid

from minicache.cache.dense import KVCache
from minicache.engine.llm import LLM, Completion
from minicache.engine.sampling import SamplingParams
from minicache.errors import CheckpointError, InvariantError, OutOfBlocksError, RequestTooLargeError, UnknownWordError
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.scheduler import ContinuousBatchScheduler, PagedScheduler, create_scheduler
from minicache.scheduler.observe import Recorder

LENGTHS = (14, 3, 11, 1, 18, 6, 8, 16)
GREEDY = SamplingParams(max_tokens=12)
FOREVER = SamplingParams(max_tokens=60, ignore_eos=True)


def params_of(**options):
    return [SamplingParams(max_tokens=length, ignore_eos=True, **options) for length in LENGTHS]


def token_ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture
def llm(model, tokenizer) -> LLM:
    return LLM(model, tokenizer=tokenizer, num_blocks=64)


@pytest.fixture(scope="module")
def text_of(model, tokenizer, alone):
    """The text of a greedy answer: the prompt and the answer decoded at once, without the prompt."""

    def text(prompt: str, num_tokens: int) -> str:
        ids = tokenizer.encode(prompt)
        return tokenizer.decode(ids + alone(ids, num_tokens)).removeprefix(prompt)

    return text


# Where an answer ends


def test_a_text_continues_its_prompt(llm, text_of):
    completions = llm.generate(["Yesterday I", "She"], [GREEDY, SamplingParams(max_tokens=5)])
    assert [each.text for each in completions] == [text_of("Yesterday I", 12), text_of("She", 5)]
    assert [each.finish_reason for each in completions] == ["length", "length"]


def test_the_end_token_ends_an_answer_and_stays_in_it(llm, tokenizer):
    (completion,) = llm.generate(["Yesterday I"], SamplingParams(max_tokens=400, temperature=1.0, seed=1))
    assert completion.finish_reason == "stop"
    assert completion.token_ids.index(tokenizer.end_token_id) == len(completion.token_ids) - 1
    num_tokens = len(completion.token_ids) + 10
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, ignore_eos=True)
    (longer,) = llm.generate(["Yesterday I"], params)
    assert len(longer.token_ids) == num_tokens
    assert longer.token_ids[: len(completion.token_ids)] == completion.token_ids


def test_stop_tokens(llm, tokenizer, alone):
    prompt = tokenizer.encode("Yesterday I")
    tokens = alone(prompt, 12)
    for ignore_eos in (False, True):  # which is about the tokenizer's end token, not about those that are named
        params = SamplingParams(max_tokens=12, stop_token_ids=(345, tokens[6]), ignore_eos=ignore_eos)
        (got,) = llm.generate([prompt], params)
        assert (got.token_ids, got.finish_reason) == (tokens[: tokens.index(tokens[6]) + 1], "stop")


@pytest.mark.parametrize(("first", "stop"), [(1, (3, 6)), (2, (1, 9)), (0, (1, 15))], ids=str)
def test_a_stop_string_over_word_borders(llm, tokenizer, alone, text_of, first, stop):
    """A stop string cut out of the text itself, beginning and ending anywhere: the text ends before it."""
    text = text_of("Yesterday I", 12)
    wanted = text[stop[0] : stop[1]]
    (got,) = llm.generate(["Yesterday I"], SamplingParams(max_tokens=12, stop=wanted))
    assert (got.text, got.finish_reason) == (text[: text.index(wanted)], "stop")
    tokens = alone(tokenizer.encode("Yesterday I"), 12)
    assert got.token_ids == tokens[: len(got.token_ids)]
    assert wanted in text_of("Yesterday I", len(got.token_ids))
    assert wanted not in text_of("Yesterday I", len(got.token_ids) - 1)
    assert llm.scheduler.pool.num_used == 0


def test_a_stop_string_with_the_last_token(llm, text_of):
    """The token that fills max_tokens completes the stop string too: the text was stopped, not cut short."""
    text = text_of("Yesterday I", 6)
    (got,) = llm.generate(["Yesterday I"], SamplingParams(max_tokens=6, stop=(text[-4:],)))
    assert (got.text, got.finish_reason) == (text[:-4], "stop")


def test_what_may_be_a_stop_string_is_not_streamed(llm, text_of):
    text = text_of("Yesterday I", 12)
    stop = text[6:20] + "nothing like it"
    chunks = list(llm.stream(["Yesterday I"], SamplingParams(max_tokens=12, stop=[stop])))
    assert "".join(chunk.text for chunk in chunks) == text
    assert "" in [chunk.text for chunk in chunks]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]


def test_stopped_requests_leave_room_for_others(model, tokenizer, prompts, watch, text_of):
    """A request that a stop string has ended is in no later batch."""
    llm = LLM(model, tokenizer=tokenizer, max_num_seqs=1, num_blocks=64, observers=[watch])
    stop = text_of("Yesterday I", 2)[-3:]
    llm.generate([prompts[0], prompts[1]], [SamplingParams(max_tokens=9, stop=stop), SamplingParams(max_tokens=1)])
    assert [list(batch) for batch in watch.batches] == [[0], [0], [1]]


def test_max_model_len(model, prompts, alone):
    llm = LLM(model, max_model_len=20, num_blocks=64)
    got = llm.generate(prompts, FOREVER)
    assert [len(prompt) + len(each.token_ids) for prompt, each in zip(prompts, got, strict=True)] == [20] * len(prompts)
    assert token_ids(got) == [alone(prompt, 20 - len(prompt)) for prompt in prompts]
    assert {each.finish_reason for each in got} == {"length"}


def test_the_model_has_an_end_too():
    """A scheduler without max_model_len: the engine knows how many positions the model has."""
    model = a_model(max_seq_len=16)
    for name in ("continuous", "paged"):
        llm = LLM(model, scheduler=create_scheduler(name, num_blocks=40, block_size=4))
        (got,) = llm.generate([[1, 2, 3, 4, 5]], FOREVER)
        assert (len(got.token_ids), got.finish_reason) == (11, "length")
        with pytest.raises(RequestTooLargeError, match="16"):
            llm.generate([[1] * 16], FOREVER)


def test_one_that_outgrows_the_whole_memory_ends_by_capacity(model, prompts, alone):
    llm = LLM(model, scheduler="paged", num_blocks=5, block_size=4)
    chunks = list(llm.stream([prompts[0]], FOREVER))
    assert [chunk.token_id for chunk in chunks] == [*alone(prompts[0], 19), None]
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "capacity"]
    (completion,) = llm.generate([prompts[0]], FOREVER)
    assert completion == Completion(alone(prompts[0], 19), "", "capacity")


def test_capacity_shows_the_text_that_was_held_back(model, tokenizer, prompts, text_of):
    llm = LLM(model, scheduler="paged", num_blocks=5, block_size=4, tokenizer=tokenizer)
    text = text_of("Yesterday I", 19)
    (got,) = llm.generate(["Yesterday I"], SamplingParams(max_tokens=60, ignore_eos=True, stop=text[-6:] + "."))
    assert (got.text, got.finish_reason) == (text, "capacity")


# Streaming


@pytest.mark.parametrize("cache", ["paged", "dense"])
def test_streaming_is_generating(model, tokenizer, prompts, cache):
    llm = LLM(model, tokenizer=tokenizer, cache=cache, max_num_seqs=3, num_blocks=64)
    params = params_of(temperature=1.0, seed=2)
    completions = llm.generate(prompts, params)
    chunks = list(llm.stream(prompts, params))
    for index, completion in enumerate(completions):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.token_id for chunk in mine] == completion.token_ids
        assert "".join(chunk.text for chunk in mine) == completion.text
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]


def test_a_chunk_comes_with_its_step(llm, prompts):
    stream = llm.stream(prompts[:3], GREEDY)
    assert not llm.has_unfinished
    assert [next(stream).index for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [len(request.output_token_ids) for request in llm.scheduler.running] == [2, 2, 2]


def test_leaving_a_stream_aborts_what_is_unfinished(llm, prompts):
    kept = llm.add_request(prompts[3], GREEDY)
    stream = llm.stream(prompts[:3], GREEDY)
    next(stream)
    stream.close()
    assert list(llm.answers) == [kept]
    assert [request.request_id for request in llm.scheduler.running] == [kept]


def test_several_callers_at_once(llm, prompts, expected_of):
    """Two streams, a generate and add_request, each taking steps for all: each gets all of its own chunks."""
    params = params_of()
    added = llm.add_request(prompts[0], params[0])
    one, two = llm.stream(prompts[1:3], params[1:3]), llm.stream(prompts[3:6], params[3:6])
    got = {1: [next(one)], 2: [next(two)]}
    assert token_ids(llm.generate(prompts[6:], params[6:])) == expected_of(range(6, 8))
    mine = llm.step()
    got[2] += two
    got[1] += one
    while llm.has_unfinished:
        mine += llm.step()
    assert {chunk.request_id for chunk in mine} == {added}
    assert [chunk.token_id for chunk in mine] == expected_of([0])[0]
    for chunks, indices in ((got[1], (1, 2)), (got[2], (3, 4, 5))):
        tokens = [[chunk.token_id for chunk in chunks if chunk.index == place] for place in range(len(indices))]
        assert tokens == expected_of(indices)


@pytest.fixture
def expected_of(prompts, alone):
    return lambda indices: [alone(prompts[i], LENGTHS[i]) for i in indices]


def test_a_request_of_a_stream_may_be_aborted(llm, prompts, alone):
    tokens = {0: [], 1: []}
    for chunk in llm.stream(prompts[:2], GREEDY):
        tokens[chunk.index].append(chunk.token_id)
        if len(tokens[0]) == 3 and chunk.index == 0:
            assert llm.abort_request(chunk.request_id)
    assert list(tokens.values()) == [alone(prompts[0], 3), alone(prompts[1], 12)]


# Refusals


def a_model(**sizes) -> MiniGPT:
    defaults = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    return MiniGPT(MiniGPTConfig(**{**defaults, "intermediate_size": 24, "max_seq_len": 64, **sizes})).eval()


@pytest.mark.parametrize(
    ("prompts", "params", "error", "says"),
    [
        ("Yesterday I", GREEDY, TypeError, "list"),
        (7, GREEDY, TypeError, "list"),
        ([1, 2], GREEDY, TypeError, "prompt"),
        ([["She"]], GREEDY, TypeError, "prompt"),
        ([[1.0]], GREEDY, TypeError, "prompt"),
        ([[True]], GREEDY, TypeError, "prompt"),
        (["She", ""], GREEDY, ValueError, "empty"),
        ([[1], []], GREEDY, ValueError, "empty"),
        ([[1], [10**6]], GREEDY, IndexError, "vocabulary"),
        ([[1], [-1]], GREEDY, IndexError, "vocabulary"),
        (["She xyzzyed"], GREEDY, UnknownWordError, "xyzzyed"),
        (["She", "I"], [GREEDY], ValueError, "one for each"),
        (["She"], [GREEDY, GREEDY], ValueError, "one for each"),
        (["She"], {"max_tokens": 3}, TypeError, "SamplingParams"),
        (["She"], None, TypeError, "params"),
        ([None], GREEDY, TypeError, "None"),
        ([b"She"], GREEDY, TypeError, "text"),
        ([[1], [1] * 600], GREEDY, RequestTooLargeError, "600"),
        ([[1], [1] * 290], GREEDY, RequestTooLargeError, "num_blocks"),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_before_anything_is_begun(model, tokenizer, prompts, params, error, says):
    llm = LLM(model, tokenizer=tokenizer, num_blocks=16)
    with pytest.raises(error, match=says):
        llm.generate(prompts, params)
    with pytest.raises(error, match=says):
        llm.stream(prompts, params)
    assert not llm.has_unfinished
    assert not llm.answers


def test_no_prompts_no_answers(llm):
    assert llm.generate([], GREEDY) == []
    assert list(llm.stream([], [])) == []


def test_one_too_large_among_those_that_are_added(llm):
    llm.add_request([1, 2], GREEDY, request_id="a")
    with pytest.raises(RequestTooLargeError, match="num_blocks"):
        LLM(llm.model, num_blocks=2).add_request([1] * 40, GREEDY)
    with pytest.raises(ValueError, match="'a'"):
        llm.add_request([1, 2], GREEDY, request_id="a")
    assert list(llm.answers) == ["a"]
    assert not llm.abort_request("b")


def test_texts_need_a_tokenizer(model):
    llm = LLM(model)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate(["She"], GREEDY)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([[1]], SamplingParams(stop="She"))
    (got,) = llm.generate([[1]], GREEDY)
    assert got.text == ""


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cache": "sparse"}, ValueError, "cache"),
        ({"scheduler": "best"}, ValueError, "best"),
        ({"max_model_len": 513}, ValueError, "512"),
        ({"max_model_len": "512"}, TypeError, "max_model_len"),
        ({"max_model_len": 64.0}, TypeError, "max_model_len"),
        ({"max_num_seqs": "8"}, TypeError, "max_num_seqs"),
        ({"block_size": None}, TypeError, "block_size"),
        ({"num_host_blocks": -1, "scheduler": "continuous"}, ValueError, "num_host_blocks"),
        ({"dtype": "float16"}, TypeError, "dtype"),
        ({"device": "nope"}, ValueError, "nope"),
        ({"num_blocks": 0}, ValueError, "num_blocks"),
        ({"preemption": "swap", "num_host_blocks": 4, "cache": "dense"}, ValueError, "dense"),
        ({"dtype": torch.float64}, ValueError, "dtype"),
        ({"device": "meta"}, ValueError, "device"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(model, options, error, says):
    with pytest.raises(error, match=says):
        LLM(model, **options)


@pytest.mark.parametrize("model", [5, None, [1, 2]], ids=str)
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match="minigpt"):
        LLM(model)


@pytest.mark.parametrize("device", ["nope", "cuda:99", "", 5.0])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match="no device"):
        LLM(device=device)


def test_a_checkpoint_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        LLM(tmp_path / "nothing")


def test_a_scheduler_that_has_requests_already(model, prompts):
    scheduler = PagedScheduler(num_blocks=8)
    LLM(model, scheduler=scheduler).add_request(prompts[0], GREEDY)
    with pytest.raises(ValueError, match="already"):
        LLM(model, scheduler=scheduler)


# Memory


def test_the_default_memory(model):
    """64 MiB or 16,384 tokens, but enough for one request and not more than for max_num_seqs of them."""
    assert LLM(model).storage.nbytes == 64 * 2**20
    assert LLM(model, max_num_seqs=2).scheduler.pool.num_blocks == 2 * 512 // 16
    large = a_model(hidden_size=64, num_heads=16, num_kv_heads=16, head_dim=64, max_seq_len=2000)
    assert LLM(large).scheduler.pool.num_blocks == 16_384 // 16
    longer = a_model(hidden_size=64, num_heads=16, num_kv_heads=16, head_dim=64, max_seq_len=20_000)
    assert LLM(longer).scheduler.pool.num_blocks == 20_000 // 16
    assert LLM(model, cache="dense").storage is None


def test_a_dense_cache_has_room_for_what_a_request_can_reach(monkeypatch, model, prompts):
    """For its prompt and answer, but never for more than max_model_len."""
    made = []

    class Noting(KVCache):
        def __init__(self, *sizes, **options):
            super().__init__(*sizes, **options)
            made.append(self.max_seq_len)

    monkeypatch.setattr("minicache.engine.kv.KVCache", Noting)
    llm = LLM(model, cache="dense", max_model_len=64)
    llm.generate([prompts[0]], SamplingParams(max_tokens=400, ignore_eos=True))
    llm.generate([prompts[0]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert made == [64, len(prompts[0]) + 3]


# A model that is given


def test_a_model_that_is_given_is_left_as_it_was(tmp_path):
    """Its weights can still be saved: the engine does not lay them out in another order while the caller uses it."""
    model = a_model()
    before = {name: (weight.clone(), weight.stride()) for name, weight in model.state_dict().items()}
    assert LLM(model).model is model
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert weight.equal(before[name][0])
        assert weight.stride() == before[name][1]


# A prefix cache


@pytest.mark.parametrize("scheduler", ["paged", "fair", "chunked"])
def test_a_block_is_found_in_the_step_in_which_decode_fills_it(model, prompts, alone, scheduler):
    """The second prompt is the first and its answer so far: a block that is being filled is found, and read."""
    llm = LLM(model, scheduler=scheduler, prefix_caching=True, block_size=4, num_blocks=64)
    first = prompts[2][:3]
    name = llm.add_request(first, GREEDY)
    follow_up = [*first, llm.step()[0].token_id, *prompts[1]]
    names, got = [name, llm.add_request(follow_up, GREEDY)], {}
    llm.step()
    requests = llm.scheduler.running
    assert [request.block_ids[0] for request in requests] == [requests[0].block_ids[0]] * 2
    llm.abort_request(name)
    while llm.has_unfinished:
        for chunk in llm.step():
            got.setdefault(chunk.request_id, []).append(chunk.token_id)
    assert got == {names[1]: alone(follow_up, GREEDY.max_tokens)[1:]}


# A scheduler that does not keep its guarantees


def test_a_scheduler_that_schedules_nothing(model, prompts):
    class Idle(PagedScheduler):
        def may_admit(self, output):
            return False

    llm = LLM(model, scheduler=Idle(num_blocks=8))
    with pytest.raises(InvariantError, match="schedules nothing"):
        llm.generate(prompts[:2], GREEDY)
    assert not llm.has_unfinished


def test_a_scheduler_that_gives_no_blocks(model, prompts):
    class Generous(ContinuousBatchScheduler):
        def blocks_to_admit(self, request):
            return 0

    llm = LLM(model, scheduler=Generous(num_blocks=8))
    with pytest.raises(InvariantError, match="given it 0 blocks"):
        llm.generate(prompts[:2], GREEDY)


# Failures


class Failing:
    """A model that raises in the passes, counted from 0, and in the layers, that it is given."""

    def __init__(self, model, failures):
        self.model, self.failures, self.num_passes = model, failures, 0
        self.config, self.parameters = model.config, model.parameters

    def hidden_states(self, token_ids, cache):
        layer = self.failures.get(self.num_passes)
        self.num_passes += 1
        if layer is None:
            return self.model.hidden_states(token_ids, cache)
        hooked = self.model.layers[layer].mlp if layer < len(self.model.layers) else self.model.norm
        handle = hooked.register_forward_hook(self.fail)
        try:
            return self.model.hidden_states(token_ids, cache)
        finally:
            handle.remove()

    def fail(self, *_):
        raise OSError("the device is gone")

    def logits(self, hidden):
        return self.model.logits(hidden)


@grid(
    {
        "layer": [0, 2, 4],
        "engine": [
            {"scheduler": "static"},
            {"cache": "dense"},
            {"cache": "dense", "num_blocks": 9, "block_size": 4},
            {"num_blocks": 9, "block_size": 4},
            {"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 30},
        ],
    }
)
def test_a_step_that_failed_can_be_tried_again(model, prompts, alone, watch, engine, layer):
    failures = dict.fromkeys((0, 1, 4, 5, 6, 9, 14, 20), layer)
    llm = LLM(Failing(model, failures), observers=[watch], **{"num_blocks": 64, **engine})
    params = params_of(temperature=1.0, seed=4)
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    got, num_failures = {index: [] for index in range(len(prompts))}, 0
    while llm.has_unfinished:
        try:
            for chunk in llm.step():
                if chunk.token_id is not None:
                    got[chunk.request_id].append(chunk.token_id)
        except OSError:
            num_failures += 1
            llm.scheduler.check()
    assert num_failures == len(failures)
    assert list(got.values()) == [
        alone(prompt, each.max_tokens, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    assert (watch.num_preempted > 0) == ("num_blocks" in engine)


def test_a_failure_in_generate_aborts_its_requests_and_no_others(model, prompts, alone):
    llm = LLM(Failing(model, {3: 1}), num_blocks=64)
    llm.add_request(prompts[0], GREEDY)
    with pytest.raises(OSError, match="gone"):
        llm.generate(prompts[1:4], GREEDY)
    assert list(llm.answers) == [0]
    tokens = []
    while llm.has_unfinished:
        tokens += [chunk.token_id for chunk in llm.step()]
    assert tokens == alone(prompts[0], 12)


def test_capacity_is_reported_though_the_model_fails(model, prompts):
    """A request that finished in `schedule()` is reported once only: the failing forward pass must not lose it."""

    class Capacity(ContinuousBatchScheduler):
        def schedule(self):
            output = super().schedule()
            if self.running and len(self.running[0].output_token_ids) == 2:
                from minicache.request import RequestStatus

                victim = self.running[0]
                output.num_scheduled_tokens.pop(victim.request_id)
                output.scheduled.remove(victim)
                self.finish_request(victim.request_id, RequestStatus.FINISHED_CAPACITY)
                output.finished.append(victim.request_id)
            return output

    llm = LLM(Failing(model, {2: 0}), scheduler=Capacity(num_blocks=64))
    llm.add_request(prompts[0], FOREVER, request_id="a")
    llm.step()
    llm.add_request(prompts[1], FOREVER, request_id="b")
    llm.step()
    with pytest.raises(OSError, match="gone"):
        llm.step()
    chunk, *_ = llm.step()
    assert (chunk.request_id, chunk.token_id, chunk.finish_reason) == ("a", None, "capacity")


class Spoiling(Failing):
    """A model that spoils the keys, values and logits of every request that has a certain token."""

    def __init__(self, model, token_id, value):
        super().__init__(model, {})
        self.token_id, self.value = token_id, value

    def hidden_states(self, token_ids, cache):
        def spoil(module, arguments, embedded):
            return embedded.masked_fill((token_ids == self.token_id)[..., None], self.value)

        handle = self.model.embed_tokens.register_forward_hook(spoil)
        try:
            return super().hidden_states(token_ids, cache)
        finally:
            handle.remove()


@grid(
    {
        "options": [
            {"cache": "dense"},
            {"scheduler": "continuous", "num_blocks": 60},
            {"scheduler": "paged", "num_blocks": 24, "preemption": "swap", "num_host_blocks": 20},
            {"prefix_caching": True, "num_blocks": 40, "max_num_batched_tokens": 16},
        ],
        "temperature,value": [(0.0, torch.nan), (1.0, torch.inf), (0.0, torch.inf), (1.0, torch.nan)],
    }
)
def test_requests_whose_logits_are_no_numbers_fail_alone(model, prompts, options, temperature, value):
    """They end with "error" and without a token; the others get theirs, then and later, also in the same blocks."""
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=5, ignore_eos=True)
    good = [prompt for prompt in prompts if len(prompt) > 1]
    expected = [LLM(model).generate([prompt], params)[0].token_ids for prompt in good]
    spoilt = next(each for each in range(1, 346) if not any(each in tokens for tokens in [*good, *expected]))
    llm = LLM(Spoiling(model, spoilt, value), block_size=4, **options)
    for _ in range(2):
        bad = [[spoilt, *prompt, *prompt] for prompt in good]
        wanted = [each for pair in zip(bad, good, strict=True) for each in pair]
        answers = llm.generate(wanted, params)
        assert [(each.token_ids, each.finish_reason) for each in answers[::2]] == [([], "error")] * len(good)
        assert [each.token_ids for each in answers[1::2]] == expected
        assert {each.finish_reason for each in answers[1::2]} == {"length"}
    assert llm.scheduler.pool.num_used == 0


def test_what_a_spoilt_request_has_left_is_not_found(model, prompts):
    """Its blocks may hold NaN, those before the spoilt token too: a later prompt that begins alike computes its own."""
    expected = LLM(model).generate([prompts[2]], GREEDY)
    spoilt = next(each for each in range(1, 346) if each not in [*prompts[2], *expected[0].token_ids])
    llm = LLM(Spoiling(model, spoilt, torch.nan), block_size=4, num_blocks=40, prefix_caching=True)
    llm.add_request([*prompts[2], spoilt], GREEDY)
    assert [chunk.finish_reason for chunk in llm.step()] == ["error"]
    assert llm.generate([prompts[2]], GREEDY) == expected


def test_one_step_gives_good_requests_their_tokens_and_ends_the_bad_ones(model, prompts):
    spoilt = next(token_id for token_id in range(1, 346) if token_id not in prompts[0])
    llm = LLM(Spoiling(model, spoilt, torch.nan))
    for request_id, prompt in enumerate((prompts[0], [*prompts[0], spoilt], prompts[0])):
        llm.add_request(prompt, GREEDY, request_id=request_id)
    chunks = llm.step()
    assert [(each.request_id, each.token_id is None, each.finish_reason) for each in chunks] == [
        (0, False, None),
        (1, True, "error"),
        (2, False, None),
    ]


class Illegible:
    """A tokenizer that cannot decode a certain token."""

    def __init__(self, tokenizer, token_id):
        self.tokenizer, self.token_id, self.end_token_id = tokenizer, token_id, tokenizer.end_token_id

    def encode(self, text):
        return self.tokenizer.encode(text)

    def decode(self, ids):
        if self.token_id in (ids := list(ids)):
            raise RuntimeError("cannot be written")
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("num_tokens", [3, 9], ids=["its last token", "one before its last"])
def test_a_request_whose_tokens_cannot_be_decoded_fails_alone(model, tokenizer, prompts, alone, num_tokens):
    first, second = alone(prompts[2], 9), alone(prompts[1], 9)
    illegible = first[2]
    assert illegible not in [*first[:2], *prompts[2], *prompts[1], *second]
    llm = LLM(model, tokenizer=Illegible(tokenizer, illegible), num_blocks=64)
    params = [SamplingParams(max_tokens=each, ignore_eos=True) for each in (num_tokens, 9)]
    bad, good = llm.generate([prompts[2], prompts[1]], params)
    assert (bad.token_ids, bad.finish_reason) == (first[:3], "error")
    assert (good.token_ids, good.finish_reason) == (second, "length")
    assert llm.scheduler.pool.num_used == 0
    assert not llm.has_unfinished


def test_an_engine_that_lasts(model, prompts):
    """The same engine for one list after the other: nothing is left behind, also after failures in the pool."""
    llm = LLM(model, num_blocks=10, block_size=4)
    first = token_ids(llm.generate(prompts, params_of()))
    for _ in range(3):
        assert token_ids(llm.generate(prompts, params_of())) == first
        assert not llm.answers
        assert llm.scheduler.pool.num_free == 10
    with pytest.raises(OutOfBlocksError):
        llm.scheduler.pool.allocate(11)


def test_observers_see_a_trace(model, prompts):
    steps = []
    llm = LLM(model, max_num_seqs=2, num_blocks=64, observers=[Recorder(steps.append)])
    llm.generate(prompts[:3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(step.batch) for step in steps] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert [event.kind for event in steps[0].events] == ["arrive"] * 3 + ["admit"] * 2


def test_importing_the_engine_draws_nothing_heavy_into_the_lower_floor():
    code = "import sys, minicache, minicache.scheduler; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model, tokenizer, monkeypatch):
    """The longest text that a tokenizer can make of max_model_len tokens may come; one character more is refused."""
    llm = LLM(model, tokenizer=tokenizer, num_blocks=64, max_model_len=16)
    longest = max((tokenizer.decode([5, token_id]) for token_id in range(1, tokenizer.vocab_size)), key=len)
    word = longest.removeprefix(tokenizer.decode([5]))
    assert len(word) == tokenizer.max_token_chars
    with pytest.raises(RequestTooLargeError, match="16 tokens"):
        llm.generate([word * 16], GREEDY)  # as many characters as may be, but a token too many
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("it was tokenized"))
    with pytest.raises(RequestTooLargeError, match="characters"):
        llm.generate([word * 16 + " "], GREEDY)
