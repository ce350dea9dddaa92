"""Phase 10, task 4: which requests a failed step ends, and that the others go on; and an engine that drains."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest
import torch

from minicache.engine.answers import request_of
from minicache.engine.async_engine import AnswerStream
from minicache.errors import EngineStoppedError, InvariantError, StepFailedError
from minicache.scheduler.observe import Observer
from minicache_course.checks import call, that

POISON = 13  # no step with a prompt that has this token succeeds
SPOILT = 17  # a prompt that has this token gets no logits, in some tests


async def check_failed(scenario, what, stream, cause=ArithmeticError):
    """The stream's last word must be a StepFailedError with the model's error as its cause."""
    __tracebackhide__ = True

    async def to_the_end():
        while await stream.take():
            pass

    outcome = await scenario.ask(f"take() of {what}, to its end", to_the_end())
    outcome.raises(StepFailedError)
    that(f"the __cause__ of the error of {what}", type(outcome.error.__cause__)).gives(cause)
    said = str(outcome.error.__cause__) in str(outcome.error)
    that(f"whether the error of {what} has the message of its cause", said).gives(True)


async def drained(stream):
    """Read to its end, or to its error, which is left for the next reader."""
    with suppress(StepFailedError):
        while await stream.take():
            pass


async def check_clean(scenario, engine):
    """Nothing is left of anybody."""
    __tracebackhide__ = True
    await scenario.until(
        "the thread is idle", lambda: engine.llm.is_clean, "no request is left, and all blocks are free"
    )
    that("engine.num_unfinished, when all have ended or failed", engine.num_unfinished).gives(0)
    that("engine.streams, when all have ended or failed", list(engine.streams)).gives([])


def breaks(llm, name, times=1):
    """Have a method of the LLM raise a MemoryError, so many times."""
    method, left = getattr(llm, name), [times]

    def broken(*arguments):
        if left[0]:
            left[0] -= 1
            raise MemoryError("no room")
        return method(*arguments)

    setattr(llm, name, broken)


def breaks_if(llm, is_bad):
    """Have each step fail of which `is_bad(requests)`. The requests of each step that failed, as it goes on."""
    run_model, failed = llm.run_model, []

    def broken(output):
        if is_bad(output.scheduled):
            failed.append([each.request_id for each in output.scheduled])
            raise ArithmeticError("the model cannot bear it")
        return run_model(output)

    llm.run_model = broken
    return failed


# Whom a failing step ends


def test_a_failed_step_is_forgotten(scenario, tiny_llm, params):
    """`fail_step` calls `last_step.forget()`, or the next failure would be blamed on requests that have gone."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        engine.call_in_loop = lambda function, *arguments: function(*arguments)
        engine.llm.add_request([1, POISON], params(), request_id="a")
        call(engine.fail_step, call(engine.llm.step).error).gives(None)
        left = [each.request_id for each in engine.last_step.requests]
        that("requests in engine.last_step after fail_step, which has to forget() them", left).gives([])

    scenario.run(main)


def test_the_new_request_of_a_failed_step_ends_alone(scenario, tiny_llm, params, all_tokens, right_answers):
    """Two requests have tokens already, a third breaks its first step: it alone fails, the two get all their tokens."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        prompts = [1, 2], [3]
        old = await scenario.open_together(engine, *((prompt, params(max_tokens=8)) for prompt in prompts))
        await scenario.until("the first step is under way", lambda: llm.steps)
        coming = asyncio.ensure_future(engine.add_request([5, POISON], params()))
        await asyncio.sleep(0)
        llm.let_all()
        await check_failed(scenario, "the request that breaks its step", await scenario.result("add_request", coming))
        for prompt, stream in zip(prompts, old, strict=True):
            outcome = await scenario.ask("the tokens of a request that had tokens before", all_tokens(stream))
            outcome.gives(right_answers(prompt, params(max_tokens=8)))
        await check_clean(scenario, engine)

    scenario.run(main)


def test_all_new_requests_of_the_step_end(scenario, tiny_llm, params, all_tokens, right_answers):
    """Two are new in the step that fails: there is no telling which it was, so both fail, and the old one not."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [old] = await scenario.open_together(engine, ([1, 2], params(max_tokens=8)))
        await scenario.until("the first step is under way", lambda: llm.steps)
        coming = [asyncio.ensure_future(engine.add_request(prompt, params())) for prompt in ([5, 6], [POISON])]
        await asyncio.sleep(0)
        llm.let_all()
        for task in coming:
            stream = await scenario.result("add_request", task)
            await check_failed(scenario, "one of two in their first step", stream)
        outcome = await scenario.ask("the tokens of a request that had tokens before", all_tokens(old))
        outcome.gives(right_answers([1, 2], params(max_tokens=8)))
        await check_clean(scenario, engine)

    scenario.run(main)


def test_a_request_in_its_prompt_is_new(scenario, tiny_llm, params, all_tokens, right_answers):
    """A long prompt is computed in chunks: in its second step a request has no token yet, and is suspected still."""

    async def main():
        llm = tiny_llm(max_num_batched_tokens=8)
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = ([1, 2], params(max_tokens=9)), ([3] * 20, params())
        old, long = await scenario.open_together(engine, *requests)
        llm.let(1)
        await scenario.until("the second step is under way", lambda: len(llm.steps) == 2)
        that("answers in the second step", len(llm.steps[1])).gives(2)
        llm.break_step()
        llm.let_all()
        await check_failed(scenario, "the request with a long prompt", long, MemoryError)
        outcome = await scenario.ask("the tokens of the other", all_tokens(old))
        outcome.gives(right_answers([1, 2], params(max_tokens=9)))
        await check_clean(scenario, engine)

    scenario.run(main)


def test_an_old_request_that_breaks_each_step_ends_after_two(scenario, tiny_llm, params, all_tokens, right_answers):
    """A request with tokens breaks each step, newcomers keep coming: two steps fail, then it is ended; others go on."""

    async def main():
        llm = tiny_llm(max_num_seqs=2)
        llm.hold()
        engine = scenario.new_engine(llm)
        [bad] = await scenario.open_together(engine, ([1, 2], params(max_tokens=9)))
        await scenario.until("its first step is under way", lambda: llm.steps)
        failed = breaks_if(llm, lambda step: any(each.request_id == bad.request_id for each in step))
        prompts = [[number, 7] for number in range(20, 26)]
        coming = [asyncio.ensure_future(engine.add_request(prompt, params())) for prompt in prompts]
        await asyncio.sleep(0)
        llm.let_all()
        innocent = [await scenario.result("add_request of a later arrival", task) for task in coming]
        await check_failed(scenario, "the request that breaks each step after its first", bad)
        num_ended = 0
        for prompt, stream in zip(prompts, innocent, strict=True):
            outcome = await scenario.ask("the tokens of a later arrival", all_tokens(stream))
            if isinstance(outcome.error, StepFailedError):
                num_ended += 1
            else:
                outcome.gives(right_answers(prompt, params()))
        num_failed = str(len(failed)) if len(failed) > 2 else "1 or 2"
        that("how many steps failed until the request that breaks each step was ended", num_failed).gives("1 or 2")
        that("of 6 later arrivals, one at a time, those that were ended", num_ended).gives(2)
        await check_clean(scenario, engine)

    scenario.run(main)


def test_a_good_step_between_two_failures(scenario, tiny_llm, params, all_tokens, right_answers):
    """A newcomer breaks its step; a step goes well; another breaks its own: each alone is ended, as if the first."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [old] = await scenario.open_together(engine, ([1, 2], params(max_tokens=9)))
        for _ in range(2):
            await scenario.until("a step is under way", lambda: llm.steps and llm.steps[-1] == [old.request_id])
            coming = asyncio.ensure_future(engine.add_request([POISON], params()))
            await asyncio.sleep(0)
            llm.let(2)  # this one, and the one that fails; the next is held
            await check_failed(
                scenario, "a newcomer that breaks its step", await scenario.result("add_request", coming)
            )
            at = len(llm.steps)
            llm.let(1)  # goes well
            await scenario.until("another step is under way", lambda at=at: len(llm.steps) > at)
        llm.let_all()
        outcome = await scenario.ask("the tokens of a request that had tokens before", all_tokens(old))
        outcome.gives(right_answers([1, 2], params(max_tokens=9)))
        await check_clean(scenario, engine)

    scenario.run(main)


def test_a_preempted_request_is_not_new(scenario, tiny_llm, params):
    """A preempted request computes its prompt again, but has tokens: it is not new, so all of the step fail."""

    async def main():
        llm = tiny_llm(num_blocks=8, max_num_seqs=3)
        engine = scenario.new_engine(llm)

        def is_bad(step):
            again = [
                each for each in step if each.output_token_ids and each.num_computed_tokens < each.num_prompt_tokens
            ]
            return not failed and again and len(step) > len(again) and all(each.output_token_ids for each in step)

        failed = breaks_if(llm, is_bad)
        requests = [([number] * 4, params(max_tokens=most)) for number, most in ((1, 24), (2, 9), (3, 20))]
        streams = await scenario.open_together(engine, *requests)
        for stream in streams:
            await scenario.ask("take() to the end", drained(stream))
        await check_clean(scenario, engine)
        that("how many steps failed, with a preempted request in it", len(failed)).gives(1)
        for stream in streams:
            if stream.request_id in failed[0]:
                await check_failed(scenario, "one in the step that failed", stream)

    scenario.run(main)


@pytest.mark.parametrize("at_step", [1, 3])
def test_all_of_a_step_end_if_all_or_none_are_new(scenario, tiny_llm, params, all_tokens, right_answers, at_step):
    """All of the step are in their first, or none is: all of it fail. A request that waits for a batch slot goes on."""

    async def main():
        llm = tiny_llm(max_num_seqs=2)
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = [([number], params(max_tokens=5)) for number in (1, 2, 3)]
        one, two, waiting = await scenario.open_together(engine, *requests)
        llm.let(at_step - 1)
        await scenario.until(f"step {at_step} is under way", lambda: len(llm.steps) == at_step)
        llm.break_step()
        llm.let_all()
        for stream in (one, two):
            await check_failed(scenario, f"a request in step {at_step}, that fails", stream, MemoryError)
        outcome = await scenario.ask("the tokens of a request that waited for a batch slot", all_tokens(waiting))
        outcome.gives(right_answers([3], params(max_tokens=5)))
        await check_clean(scenario, engine)

    scenario.run(main)


def test_a_failure_after_the_commit_ends_all_requests(scenario, tiny_llm, params, all_tokens, right_answers):
    """It fails while chunks are collected: no step is under way, so all requests fail, and later ones are served."""

    async def main():
        llm = tiny_llm(max_num_batched_tokens=8)
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = ([1, 2], params(max_tokens=9)), ([3] * 20, params())
        old, long = await scenario.open_together(engine, *requests)
        llm.let(1)
        await scenario.until("the second step is under way", lambda: len(llm.steps) == 2)
        breaks(llm, "collect")
        llm.let_all()
        for what, stream in (("one with tokens", old), ("one in its prompt", long)):
            await check_failed(scenario, f"{what}, in a step that fails after update_from_output", stream, MemoryError)
        await check_clean(scenario, engine)
        stream = await scenario.result("add_request afterwards", engine.add_request([4], params()))
        (await scenario.ask("its tokens", all_tokens(stream))).gives(right_answers([4], params()))

    scenario.run(main)


def test_a_failed_schedule_ends_all_requests(scenario, tiny_llm, params, all_tokens, right_answers):
    """`schedule()` itself raises, so no request is in a step: all fail, waiting ones too; later ones are served."""

    async def main():
        llm = tiny_llm(max_num_seqs=1)
        breaks(llm.scheduler, "schedule")
        engine = scenario.new_engine(llm)
        requests = [([number], params()) for number in (1, 2)]
        for stream in await scenario.open_together(engine, *requests):
            await check_failed(scenario, "a request, when schedule() raises", stream, MemoryError)
        await check_clean(scenario, engine)
        stream = await scenario.result("add_request afterwards", engine.add_request([4], params()))
        (await scenario.ask("its tokens", all_tokens(stream))).gives(right_answers([4], params()))

    scenario.run(main)


def test_a_failed_schedule_is_not_the_step_before(scenario, tiny_llm, params, all_tokens, right_answers):
    """The tokens of the step before were recorded: it is not the one that fails. All requests do; later ones do not."""

    async def main():
        llm = tiny_llm(max_num_seqs=1)
        llm.hold()
        engine = scenario.new_engine(llm)
        streams = await scenario.open_together(engine, ([1], params()), ([2], params()))
        await scenario.until("the first step is under way", lambda: llm.steps)
        breaks(llm.scheduler, "schedule")
        llm.let_all()
        for stream in streams:
            await check_failed(scenario, "a request, when schedule() raises", stream, MemoryError)
        await check_clean(scenario, engine)
        stream = await scenario.result("add_request afterwards", engine.add_request([4], params()))
        (await scenario.ask("its tokens", all_tokens(stream))).gives(right_answers([4], params()))

    scenario.run(main)


def test_a_failure_when_the_step_has_finished(scenario, tiny_llm, params, all_tokens, right_answers):
    """`schedule()` raises, and all of the step before have finished: the engine goes on."""

    async def main():
        llm = tiny_llm()
        engine = scenario.engine(llm)
        stream = await scenario.result("add_request", engine.add_request([1], params(max_tokens=1)))
        await scenario.result("its token", all_tokens(stream))
        breaks(llm.scheduler, "schedule")
        stream = await scenario.result("add_request", engine.add_request([2], params()))
        await scenario.ask("its tokens, or an error", drained(stream))
        stream = await scenario.result("add_request afterwards", engine.add_request([4], params()))
        (await scenario.ask("its tokens", all_tokens(stream))).gives(right_answers([4], params()))

    scenario.run(main)


def test_a_step_that_fails_after_its_last_token_ends_no_request(scenario, tiny_llm, params, all_tokens, right_answers):
    """It fails when the step's only request is finished: its client has all tokens, and there is none left to end."""

    class Fails(Observer):
        def on_update(self, scheduler, output, finished):
            if finished and not failed:
                failed.append(True)
                raise MemoryError("no room")

    failed = []

    async def main():
        engine = scenario.engine(tiny_llm(observers=[Fails()]))
        for _ in range(2):
            stream = await scenario.result("add_request", engine.add_request([1], params()))
            outcome = await scenario.ask("the tokens of a request", all_tokens(stream))
            outcome.gives(right_answers([1], params()))
        that("whether a step has failed", failed).gives([True])
        await check_clean(scenario, engine)

    scenario.run(main)


def test_all_answers_of_a_request_end_together(scenario, tiny_llm, params, all_tokens, right_answers):
    """A request with n = 3 fails as one: its stream raises once, three slots are free, and the engine goes on."""

    async def main():
        llm = tiny_llm()
        engine = scenario.engine(llm, max_waiting=0)
        for _ in range(3):
            stream = await scenario.result("add_request(n=3)", engine.add_request([POISON], params(n=3)))
            await check_failed(scenario, "a request with n = 3", stream)
            stream.close()
            await check_clean(scenario, engine)
        stream = await scenario.result("add_request(n=4)", engine.add_request([4], params(n=4)))
        (await scenario.ask("its tokens", all_tokens(stream))).gives(right_answers([4], params(n=4)))

    scenario.run(main)


def test_an_answer_fails_when_the_first_one_has_ended(scenario, tiny_llm, params, all_tokens, right_answers):
    """One batch slot, n = 2: the first answer has all its tokens when a step of the second fails: the request ends."""

    async def main():
        llm = tiny_llm(max_num_seqs=1)
        failed = breaks_if(
            llm, lambda step: len(failed) < 3 and any(request_of(each.request_id) != each.request_id for each in step)
        )
        engine = scenario.engine(llm)
        stream = await scenario.result("add_request(n=2)", engine.add_request([1], params(n=2)))
        what = "a request whose first answer has ended when a step of its second fails"
        await check_failed(scenario, what, stream)
        await check_clean(scenario, engine)
        that("steps that failed: the request is ended after the first", len(failed)).gives(1)
        stream = await scenario.result("add_request afterwards", engine.add_request([4], params()))
        (await scenario.ask("its tokens", all_tokens(stream))).gives(right_answers([4], params()))

    scenario.run(main)


def test_failed_requests_are_named_once(scenario, tiny_llm, params, caplog):
    """Two requests, of 2 answers and of 1, fail: one call of `fail`, each id once; and the log has the error."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        calls, fail = [], engine.fail

        def spy(request_ids, error):
            calls.append(list(request_ids))
            fail(request_ids, error)

        engine.fail = spy
        streams = await scenario.open_together(engine, ([1, 2], params(n=2)), ([3], params()))
        llm.let(1)
        await scenario.until("the second step is under way", lambda: len(llm.steps) == 2)
        that("answers in the second step", len(llm.steps[1])).gives(3)
        llm.let(1)
        await scenario.until("the third step is under way", lambda: len(llm.steps) == 3)
        llm.break_step()
        llm.let_all()
        for stream in streams:
            await check_failed(scenario, "a request in the step that fails", stream, MemoryError)
        that("the ids in each call of fail", calls).gives([[stream.request_id for stream in streams]])
        await check_clean(scenario, engine)

    scenario.run(main)
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    that("errors that are in the log, with their traceback (exc_info)", logged).gives([MemoryError])


def test_a_child_in_its_first_step(scenario, tiny_llm, params, all_tokens, right_answers):
    """n = 2, and the second answer's first step fails: the whole request fails, and an older one goes on."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = ([1, 2], params(max_tokens=8)), ([5, 6], params(n=2))
        old, both = await scenario.open_together(engine, *requests)
        llm.let(1)
        await scenario.until("the second step is under way", lambda: len(llm.steps) == 2)
        that("answers in the second step", len(llm.steps[1])).gives(3)
        llm.break_step()
        llm.let_all()
        await check_failed(scenario, "a request whose second answer is in its first step", both, MemoryError)
        outcome = await scenario.ask("the tokens of the other", all_tokens(old))
        outcome.gives(right_answers([1, 2], params(max_tokens=8)))
        await check_clean(scenario, engine)

    scenario.run(main)


def test_dispatch_continues_after_a_failed_answer(scenario, tiny_llm, a_chunk):
    """The first of a step's two chunks is an error: its stream fails, and the second still reaches its stream."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        streams = {name: AnswerStream(name, 1, lambda stream: None) for name in "ab"}
        engine.streams.update(streams)
        engine.num_unfinished = 2
        aborted, second = [], a_chunk("here", request_id="b")
        engine.llm.abort_request = aborted.append
        call(engine.dispatch, [a_chunk("", "error", request_id="a"), second]).gives(None)
        that("engine.num_unfinished, when one of 2 answers has failed", engine.num_unfinished).gives(1)
        while not engine.commands.empty():
            engine.commands.get()()
        that("requests that the commands of dispatch abort, of a failed 'a' and then a good 'b'", aborted).gives(["a"])
        (await scenario.ask("take() of the stream of the second chunk", streams["b"].take())).gives([second])
        (await scenario.ask("take() of the stream that has failed", streams["a"].take())).raises(StepFailedError)

    scenario.run(main)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_fails_alone(scenario, tiny_llm, params, all_tokens, right_answers, n):
    """NaN for one request of a step: its stream raises StepFailedError, its slots are free, the others go on."""

    async def main():
        llm = tiny_llm()
        pick = llm.pick

        def spoil(output, logits):
            bad = [SPOILT in each.prompt_token_ids for each in output.scheduled]
            return pick(output, logits.masked_fill(torch.tensor(bad)[:, None], torch.nan))

        llm.pick = spoil
        engine = scenario.new_engine(llm)
        requests = ([1, 2], params(max_tokens=8)), ([SPOILT, 3], params(n=n)), ([5, 6], params())
        first, bad, last = await scenario.open_together(engine, *requests)
        outcome = await scenario.ask("take() of a request without logits", all_tokens(bad))
        outcome.raises(StepFailedError)
        for stream, (prompt, its) in ((first, requests[0]), (last, requests[2])):
            (await scenario.ask("the tokens of the others", all_tokens(stream))).gives(right_answers(prompt, its))
        that("whether the last step has failed", engine.last_step.has_failed).gives(False)
        await check_clean(scenario, engine)

    scenario.run(main)


def test_one_failed_answer_ends_its_request(scenario, tiny_llm, params, all_tokens):
    """A request is one client's: if one of its answers fails, the others are aborted, by the engine's thread."""

    async def main():
        llm = tiny_llm()
        pick, abort, aborting = llm.pick, llm.abort_request, set()

        def abort_request(request_id):
            aborting.add(threading.current_thread().name)
            return abort(request_id)

        llm.abort_request = abort_request

        def spoil(output, logits):
            bad = [
                len(each.output_token_ids) == 2 and request_of(each.request_id) != each.request_id
                for each in output.scheduled
            ]
            return pick(output, logits.masked_fill(torch.tensor(bad)[:, None], torch.nan))

        llm.pick = spoil
        engine = scenario.engine(llm)
        stream = await scenario.result("add_request(n=3)", engine.add_request([1], params(max_tokens=40, n=3)))
        outcome = await scenario.ask("take() of a request, one of whose answers has no logits", all_tokens(stream))
        outcome.raises(StepFailedError)
        await check_clean(scenario, engine)
        num_steps = str(len(llm.steps)) if len(llm.steps) >= 20 else "fewer than 20"
        that("steps of a request of 40 tokens, an answer of which fails early", num_steps).gives("fewer than 20")
        that("threads that call llm.abort_request: the LLM is its thread's", aborting).gives({"minicache-engine"})

    scenario.run(main)


def test_a_failure_without_requests_is_an_invariant_error(scenario, tiny_llm):
    """A step failed and there is no request: going on would fail forever, so it is an InvariantError."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        error = MemoryError("no room")
        outcome = call(engine.fail_step, error)
        outcome.raises(InvariantError)
        that("whether its __cause__ is the step's error", outcome.error.__cause__ is error).gives(True)

    scenario.run(main)


# The end


def test_drain_waits_for_all_and_admits_none(scenario, tiny_llm, params, all_tokens, right_answers):
    """While `drain` waits, no request is admitted; running and waiting ones get all their tokens. Then: True."""

    async def main():
        llm = tiny_llm(max_num_seqs=1)
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = [([number], params()) for number in (1, 2)]
        streams = await scenario.open_together(engine, *requests)
        draining = asyncio.ensure_future(engine.drain(60.0))
        await scenario.waits("drain(60) with two requests", draining, "they have not ended")
        outcome = await scenario.ask("add_request while the engine drains", engine.add_request([4], params()))
        outcome.raises(EngineStoppedError)
        llm.let_all()
        for (prompt, its), stream in zip(requests, streams, strict=True):
            outcome = await scenario.ask("the tokens of a request while the engine drains", all_tokens(stream))
            outcome.gives(right_answers(prompt, its))
        (await scenario.ask("drain(60), when both have ended", draining)).gives(True)

    scenario.run(main)


def test_drain_of_an_idle_engine(scenario, tiny_llm, params, all_tokens):
    """No request is unfinished, before the first and after the last: `drain` returns True at once."""

    async def main():
        engine = scenario.engine(tiny_llm())
        (await scenario.ask("drain(60) of a new engine", engine.drain(60.0))).gives(True)
        engine.is_draining = False
        stream = await scenario.result("add_request", engine.add_request([1], params()))
        await scenario.result("its tokens", all_tokens(stream))
        (await scenario.ask("drain(60) of an engine whose requests are finished", engine.drain(60.0))).gives(True)
        that("engine.is_draining", engine.is_draining).gives(True)

    scenario.run(main)


def test_drain_gives_up_after_its_seconds(scenario, tiny_llm, params):
    """A request does not finish: `drain(0.05)` returns False after its time. The request is still there."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [stream] = await scenario.open_together(engine, ([1], params()))
        (await scenario.ask("drain(0.05), while a step is held", engine.drain(0.05))).gives(False)
        scenario.check_no_task_is_left()
        that("engine.num_unfinished, after that", engine.num_unfinished).gives(1)
        that("whether engine.streams still has the stream", list(engine.streams.values()) == [stream]).gives(True)

    scenario.run(main)


def test_drain_that_is_cancelled(scenario, tiny_llm, params):
    """The task that drains is cancelled: so is `drain`, which has no answer then; nothing is ended by that."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [stream] = await scenario.open_together(engine, ([1], params()))
        draining = asyncio.ensure_future(engine.drain(60.0))
        await scenario.waits("drain(60) with a request", draining, "it has not ended")
        draining.cancel()
        (await scenario.ask("drain(60), cancelled", draining)).raises(asyncio.CancelledError)
        that("whether engine.streams still has the stream", list(engine.streams.values()) == [stream]).gives(True)

    scenario.run(main)


@pytest.mark.parametrize("how", ["its client leaves", "its step fails"])
def test_drain_ends_with_the_last_request(scenario, tiny_llm, params, how):
    """The last request does not end, but its client leaves, or it fails: `drain` is over, too."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [stream] = await scenario.open_together(engine, ([POISON], params()))
        draining = asyncio.ensure_future(engine.drain(60.0))
        await scenario.waits("drain(60) with a request", draining, "it has not ended")
        if how == "its client leaves":
            stream.close()
        else:
            llm.let_all()
            await scenario.until("it has failed", lambda: not engine.num_unfinished)
        outcome = await scenario.wakes(f"drain(60) with one request left, and then {how}", draining)
        outcome.gives(True)

    scenario.run(main)


def test_stop_fails_what_drain_left(scenario, tiny_llm, params):
    """`stop` fails unfinished requests (EngineStoppedError), aborts them, and ends the thread."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [stream] = await scenario.open_together(engine, ([1], params(max_tokens=99)))
        (await scenario.ask("drain(0)", engine.drain(0.0))).gives(False)
        stopping = asyncio.ensure_future(engine.stop())
        outcome = await scenario.ask("take() of a stream that the engine did not wait for", stream.take())
        outcome.raises(EngineStoppedError)
        llm.let_all()
        await scenario.until("the thread has ended", engine.has_ended.is_set)
        (await scenario.ask("stop()", stopping)).gives(None)
        that("whether all requests are aborted, and all blocks free", llm.is_clean).gives(True)

    scenario.run(main)
