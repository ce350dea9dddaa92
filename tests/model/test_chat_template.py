"""A chat template is a program that comes with a model: it is ended when it takes too much, and the next one is filled
in."""

from __future__ import annotations

import gc
import os

import pytest

from minicache.model.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set all = namespace(text='a') %}{% for _ in range(60) %}{% set all.text = all.text ~ all.text %}{% endfor %}"
)

HOSTILE = {
    "loops": (LOOPS, "it takes more than 1 s of computing"),
    "a power": ("{% set x = 10 %}{{ x ** (x ** x) }}", "it takes more than 1 s of computing"),
    "a long text": ("{{ 'a' * 10 ** 10 }}", "it takes more than 512 MiB of memory"),
    "a text doubled": (DOUBLES, "it takes more than 512 MiB of memory"),
    "a text that is too long": ("{{ 'a' * 2097153 }}", "it writes more than 2,097,152 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "no end": ("{% if", "unexpected"),
    "the sandbox": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "its own refusal": ("{{ raise_exception('no') }}", "no"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_too_much_is_refused_and_the_next_conversation_served(name: str) -> None:
    source, message = HOSTILE[name]
    condition = "{% if messages[0].content == 'hi' %}" + source + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(condition if name != "no end" else source, {})
    with pytest.raises(ValueError, match=message):
        template.render(HI)
    if name != "no end":
        assert template.render([{"role": "user", "content": "\ud800 é"}]) == "\ud800 é"


def test_a_template_has_what_transformers_gives_it() -> None:
    source = (
        "{{ bos_token }}\n{%- for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not tools and not documents %}>{{ strftime_now('%Y')[:2] }}{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(HI) == '<s>{"role": "user", "content": "hi"}>20'


def test_its_process_ends_with_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render(HI)
    process = template._process._process
    assert process is not None
    del template
    gc.collect()
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
