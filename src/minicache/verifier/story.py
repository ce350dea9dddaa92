"""A counterexample in words: a line for each thing that happens, and the rule that is broken. Pure standard library."""

from __future__ import annotations

from collections.abc import Iterator
from gettext import gettext as _

from minicache.request import Request, RequestId
from minicache.verifier.explore import ERROR, Case, Violation, replay
from minicache.verifier.world import STOP, Moment


def story(case: Case, violation: Violation) -> Iterator[str]:
    """The lines of a violation's story, in the reader's language: the server, what happens, and what is wrong."""
    server = case.make()
    words = _("A server with {blocks} blocks of {size} tokens, {slots} batch slots, at most {budget} tokens a step.")
    yield words.format(
        blocks=server.pool.num_blocks,
        size=server.pool.block_size,
        slots=server.max_num_seqs,
        budget=server.max_num_batched_tokens,
    )
    step, is_raised = -1, violation.rule == ERROR
    moments = replay(case, violation.actions[: len(violation.actions) - is_raised])
    for number, action in enumerate(violation.actions):
        if number == violation.loop:
            yield _("And from here on, forever:")
        step += action.kind in ("schedule", "retry")
        moment = next(moments, None)
        line = _attempt(action.kind, action.subject, step) if moment is None else told(moment, step)
        yield f"{number + 1}. {line}"
    yield f"→ {violation.rule}: {violation.message}"


def _attempt(kind: str, subject: RequestId, step: int) -> str:
    """What was tried when the scheduler raised an error."""
    words = {
        "schedule": _("Step {step} is to be scheduled."),
        "retry": _("The step fails, and step {step} is to be scheduled."),
        "commit": _("Step {step} is computed, and its tokens are to be recorded."),
        "fail": _("The step fails, and recover() is called."),
        "abort": _("The client of request {request} leaves."),
        "error": _("Request {request} fails alone: its values are NaN."),
        "arrive": _("A request arrives."),
        "fork": _("Request {request} is forked."),
        "branch": _("Request {request} is forked."),
    }
    return words[kind].format(step=step, request=subject)


def told(moment: Moment, step: int) -> str:
    """One action, and what came of it, as a line.

    Args:
        moment: the action.
        step: the number of the step that was scheduled last.
    """
    kind, subject = moment.action.kind, moment.action.subject
    if kind == "arrive":
        new = _newest(moment)
        words = _(
            "Request {request} arrives: {prompt} prompt tokens, at most {output} to generate, priority {priority}."
        )
        return words.format(
            request=new.request_id, prompt=new.num_prompt_tokens, output=new.max_tokens, priority=new.priority
        )
    if kind in ("fork", "branch"):
        words = _("Request {request} is forked: request {child} continues with the same output.")
        if kind == "branch":
            words = _("Request {request} is forked: request {child} continues with another last token.")
        return words.format(request=subject, child=_newest(moment).request_id)
    if kind == "commit":
        return _committed(moment, step)
    if kind in ("schedule", "retry"):
        return _scheduled(moment, step)
    return _attempt(kind, subject, step)


def _newest(moment: Moment) -> Request:
    """The request that was added."""
    return next(each for each in moment.after if each.request_id not in moment.before)


def _scheduled(moment: Moment, step: int) -> str:
    output = moment.output
    assert output is not None
    first = _("The step fails, and step {step} is scheduled:") if moment.action.kind == "retry" else ""
    parts = [
        _("{tokens} of request {request} in blocks {blocks}").format(
            tokens=output.num_scheduled_tokens[each.request_id],
            request=each.request_id,
            blocks=" ".join(map(str, each.block_ids)),
        )
        for each in output.scheduled
    ]
    line = (first or _("Step {step} is scheduled, tokens:")).format(step=step)
    line += " " + (", ".join(parts) or _("none")) + "."
    for request_id in output.preempted:
        words = _("Request {request} is swapped out.") if request_id in output.swapped_out else ""
        line += " " + (words or _("Request {request} is preempted.")).format(request=request_id)
    for request_id in output.finished:
        line += " " + _("Request {request} is finished: the pool is too small for it.").format(request=request_id)
    return line


def _committed(moment: Moment, step: int) -> str:
    output = moment.output
    assert output is not None
    line = _("Step {step} is computed.").format(step=step)
    for request in output.scheduled:
        note = moment.before.get(request.request_id)
        if note is None or request.status.is_finished > (request in moment.finished):
            continue  # it was finished from outside before
        if len(request.output_token_ids) == len(note.output_token_ids):
            continue
        words = _("Request {request} generates token {number}.")
        if request.output_token_ids[-1] == STOP:
            words = _("Request {request} generates a stop token.")
        line += " " + words.format(request=request.request_id, number=len(request.output_token_ids))
    for request in moment.finished:
        line += " " + _("Request {request} has finished.").format(request=request.request_id)
    return line
