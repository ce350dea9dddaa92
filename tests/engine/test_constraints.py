"""Constrained answers: they are what was asked for, drawn from the model's distribution, and nothing to the others."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine.test_recovery import ENGINES, sabotage, serve

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import ConstraintError, MissingExtraError
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT

SENTENCE = r"(Tomorrow|Later) (she|I)( \w+){2,5}\."
ANSWERS = ("Yes, she did.", "No, she did not.", "No")
FREE = SamplingParams(max_tokens=12, ignore_eos=True)


def wishes_of(temperature: float) -> list[SamplingParams]:
    """Free and constrained ones, one of which wants several answers."""
    given: Any = {"temperature": temperature, "max_tokens": 14}
    return [
        SamplingParams(**given, seed=1, regex=SENTENCE),
        SamplingParams(**given, seed=2, ignore_eos=True),
        SamplingParams(**given, seed=3, choice=ANSWERS, n=3),
        SamplingParams(**given, seed=4, regex=r"(\w+ ?){9,20}", ignore_eos=True),
        SamplingParams(**given, seed=5, n=2, ignore_eos=True),
    ]


def texts(llm: LLM, prompt: str, params: SamplingParams) -> list[str]:
    return [each.text.removeprefix(" ") for each in llm.generate([prompt], params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_what_was_asked_for(model: MiniGPT, tokenizer: Tokenizer, temperature: float) -> None:
    llm = LLM(model, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=0, n=20, regex=SENTENCE)
    for text in texts(llm, "She worked yesterday.", params):
        assert re.fullmatch(SENTENCE, text), text
    params = SamplingParams(max_tokens=40, temperature=3 * temperature, seed=0, n=20, choice=ANSWERS)
    found = texts(llm, "Did she work yesterday?", params)
    assert {*found} <= {*ANSWERS}
    assert len({*found}) > 1 or not temperature


@pytest.mark.parametrize("text", ["a b", "a.b*", 'say "no"/\\', "ü-#&~ 😀", "[x]{2}(y)^$|?", "two\nlines"])
def test_a_choice_stands_for_itself(text: str) -> None:
    class Letters:
        """A token for each byte."""

        end_token_id = 0
        max_token_chars = 1

        def token_bytes(self) -> list[bytes]:
            return [b"", *(bytes([each]) for each in range(256))]

        def encode(self, text: str) -> list[int]:
            return [1 + each for each in text.encode()]

        def decode(self, ids: Sequence[int]) -> str:
            return bytes(each - 1 for each in ids if each).decode(errors="replace")

    letters = Letters()
    llm = LLM(letters_model(257), tokenizer=letters)
    [answer] = llm.generate(["x"], SamplingParams(max_tokens=30, choice=[text, text + "!"], temperature=1.0, seed=0))
    assert answer.text in (text, text + "!")
    assert answer.finish_reason == "stop"


def letters_model(vocab_size: int) -> MiniGPT:
    from minicache.model import MiniGPTConfig

    return MiniGPT(MiniGPTConfig(vocab_size=vocab_size, num_layers=1, max_seq_len=64))


def test_tokens_are_drawn_from_what_is_allowed(model: MiniGPT, tokenizer: Tokenizer) -> None:
    """The allowed tokens keep the odds that the model gives them, and log probabilities are over them."""
    prompt, choice = "Did she work yesterday?", ("Yes", "No")

    def first(num_logprobs: int, params: SamplingParams) -> dict[int, float]:
        llm.add_request(prompt, params, num_logprobs=num_logprobs)
        chunks = []
        while llm.has_unfinished:
            chunks += llm.step()
        assert chunks[0].logprobs is not None
        return dict(chunks[0].logprobs.top)

    llm = LLM(model, tokenizer=tokenizer)
    free = first(20, SamplingParams(max_tokens=1, temperature=1.0, seed=0))
    held = first(2, SamplingParams(max_tokens=2, temperature=1.0, seed=0, choice=choice))
    ids = [tokenizer.encode(each)[0] for each in choice]
    whole = math.log(sum(math.exp(free[each]) for each in ids))
    assert held == pytest.approx({each: free[each] - whole for each in ids}, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_do_not_depend_on_the_batch_or_on_failures(
    model: MiniGPT, tokenizer: Tokenizer, prompts: list[list[int]], engine: str, temperature: float
) -> None:
    wishes = wishes_of(temperature)
    alone = {}
    for index, (prompt, params) in enumerate(zip(prompts[:5], wishes, strict=True)):
        [alone[index]] = serve(LLM(model, tokenizer=tokenizer), [prompt], [params]).values()
    llm = LLM(model, tokenizer=tokenizer, **ENGINES[engine])
    assert serve(llm, prompts[:5], wishes) == alone
    for where in ("run_model", "run_model, after", "sample"):
        llm = LLM(model, tokenizer=tokenizer, **ENGINES[engine])
        failing = sabotage(llm, where, first=3, every=11)
        assert serve(llm, prompts[:5], wishes) == alone, where
        assert failing.num_failures, where


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "minigpt-draft"])
def test_draft_tokens_change_nothing(
    model: MiniGPT, tokenizer: Tokenizer, prompts: list[list[int]], drafter: str, temperature: float
) -> None:
    wishes = [*wishes_of(temperature), SamplingParams(max_tokens=30, regex=r"(\w+ the (\w+) \w+\. ?){4}")]
    plain = serve(LLM(model, tokenizer=tokenizer, num_blocks=200), prompts[:6], wishes)
    for options in ({"num_blocks": 200}, {"num_blocks": 16, "block_size": 4}):
        llm = LLM(model, tokenizer=tokenizer, speculative=drafter, **options)
        assert serve(llm, prompts[:6], wishes) == plain
        assert llm.scheduler.draft_stats.num_accepted_tokens  # type: ignore[attr-defined]


def test_log_probabilities_of_accepted_drafts(model: MiniGPT, tokenizer: Tokenizer) -> None:
    found = []
    for speculative in (None, "minigpt-draft"):
        llm = LLM(model, tokenizer=tokenizer, speculative=speculative)
        llm.add_request("She worked.", SamplingParams(max_tokens=20, regex=SENTENCE), num_logprobs=2)
        chunks = []
        while llm.has_unfinished:
            chunks += llm.step()
        found.append([(each.token_id, each.logprobs and each.logprobs.logprob) for each in chunks])
    assert [token for token, _ in found[0]] == [token for token, _ in found[1]]
    assert [value for _, value in found[0]] == pytest.approx([value for _, value in found[1]], abs=1e-4)


def test_n_answers_equal_requests_with_their_seeds(model: MiniGPT, tokenizer: Tokenizer) -> None:
    llm = LLM(model, tokenizer=tokenizer)
    params: Any = {"max_tokens": 30, "temperature": 1.0, "regex": SENTENCE}
    together = texts(llm, "She worked.", SamplingParams(**params, seed=7, n=4))
    one_by_one = [texts(llm, "She worked.", SamplingParams(**params, seed=7 + turn))[0] for turn in range(4)]
    assert together == one_by_one
    assert len({*together}) > 1


def test_an_end_token_comes_only_where_the_text_may_end(model: MiniGPT, tokenizer: Tokenizer) -> None:
    llm = LLM(model, tokenizer=tokenizer)
    for ignore_eos, most in ((False, 6), (True, 6)):
        params = SamplingParams(
            max_tokens=20, temperature=5.0, seed=0, n=30, regex=r"\w+( \w+){1,5}", ignore_eos=ignore_eos
        )
        answers = llm.generate(["The"], params)
        lengths = {len(each.token_ids) - 1 for each in answers}
        assert all(each.token_ids[-1] == tokenizer.end_token_id for each in answers)
        assert {each.finish_reason for each in answers} == {"stop"}
        assert lengths == {most} if ignore_eos else min(lengths) >= 2


def test_a_stop_string_and_max_tokens_still_end_an_answer(model: MiniGPT, tokenizer: Tokenizer) -> None:
    llm = LLM(model, tokenizer=tokenizer)
    [short] = llm.generate(["She"], SamplingParams(max_tokens=3, regex=r"(\w+ ?){9}"))
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)
    [stopped] = llm.generate(["She"], SamplingParams(max_tokens=9, regex=r"Yes, (she|I) did\.", stop=" did"))
    assert (stopped.finish_reason, stopped.text[:5]) == ("stop", " Yes,")


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_nothing_is_allowed_one_request_ends(
    model: MiniGPT, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, overlaps: bool
) -> None:
    llm = LLM(model, tokenizer=tokenizer, async_scheduling=overlaps)
    [plain] = llm.generate(["The"], FREE)
    llm.generate(["The"], SamplingParams(max_tokens=14, choice=ANSWERS))
    assert not caplog.text
    [late, free] = llm.generate(["The"] * 2, [SamplingParams(regex="Yes, xyz"), FREE])
    assert free == plain
    assert (late.finish_reason, late.text, len(late.token_ids)) == ("error", " Yes,", 2)
    assert "a constraint allows no token" in caplog.text
    assert llm.generate(["The"], FREE) == [plain]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, '"uniqueItems" is not supported'),
        ({"json_schema": {"if": {}, "then": {}}}, '"if", "then" are not supported'),
        ({"json_schema": {"type": "string", "format": "bogus"}}, "format: bogus"),
        ({"json_schema": {"type": "strin"}}, "strin"),
        ({"json_schema": '{"type":'}, "EOF while parsing"),
        ({"json_schema": {"enum": []}}, "anyOf is empty"),
        ({"json_schema": {"type": "object"}}, "json_schema: no token can begin such a text"),
        ({"regex": "xyz"}, "regex: no token can begin such a text"),
        ({"regex": "(a|b"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(
    model: MiniGPT, tokenizer: Tokenizer, given: dict[str, Any], named: str
) -> None:
    llm = LLM(model, tokenizer=tokenizer)
    params = SamplingParams(**given)
    with pytest.raises(ConstraintError, match=re.escape(named)):
        llm.generate(["She", "He"], [FREE, params])
    with pytest.raises(ConstraintError, match=re.escape(named)):
        llm.add_request("She", params)
    assert not llm.has_unfinished


def test_what_is_missing_is_named(model: MiniGPT, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        end_token_id = 0
        encode, decode = tokenizer.encode, tokenizer.decode

    constrained = SamplingParams(regex="Yes")
    with pytest.raises(ConstraintError, match="needs a tokenizer: give"):
        LLM(model).add_request([1], constrained)
    with pytest.raises(ConstraintError, match="token_bytes"):
        LLM(model, tokenizer=Plain()).add_request([1], constrained)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = LLM(model, tokenizer=tokenizer)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'minicache-course[structured]'")):
        llm.add_request("She", constrained)
    assert not llm.has_unfinished
    llm.generate(["She"], FREE)


def test_params() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert SamplingParams(json_schema=schema).json_schema == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert SamplingParams(choice=["a", "b"]).of_answer(1).choice == ("a", "b")
    assert not SamplingParams().is_constrained
    with pytest.raises(ValueError, match="one constraint"):
        SamplingParams(regex="a", choice=["a"])
    with pytest.raises(ValueError, match="choice is empty"):
        SamplingParams(choice=[])
    for wrong in ({"json_schema": 3}, {"regex": 3}, {"choice": "ab"}, {"choice": [1]}):
        with pytest.raises(TypeError):
            SamplingParams(**wrong)  # type: ignore[arg-type]
