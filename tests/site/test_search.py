"""The search finds what readers ask for: twenty questions in English, ten in Spanish, and the pages that answer."""

import json
from collections.abc import Iterator

import pytest
from tests.site.chromium import Chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first

GLOSSARY = "glossary/"
QUESTIONS = {
    "": {
        "what is a block table": ["phase-03-paged-cache/theory/02-block-tables/", GLOSSARY],
        "how do I run on GPU": ["reference/gpu/"],
        "time to first token": [GLOSSARY],
        "get a hint": ["reference/cli/"],
        "install": ["setup/"],
        "does it run on Windows?": ["questions/"],
        "how long does the course take": ["course-map/"],
        "copy-on-write": ["phase-08-prefix-sharing/theory/03-copy-on-write/"],
        "beam search": ["phase-08-prefix-sharing/theory/04-parallel-sampling-and-beam-search/"],
        "speculative decoding": ["phase-09-chunked-prefill/theory/04-speculative-decoding/"],
        "chunked prefill": ["phase-09-chunked-prefill/"],
        "continuous batching": ["phase-05-continuous-batching/"],
        "roofline": ["phase-00-decode-arithmetic/theory/04-the-roofline/"],
        "recompute or swap": ["phase-06-preemption/theory/03-recompute-or-swap/"],
        "preempted": ["phase-06-preemption/"],
        "starvation": [GLOSSARY],
        "grade a class": ["reference/cli/", "teaching/"],
        "prometheus metrics": ["reference/metrics/"],
        "api key": ["reference/limits/"],
        "BlockPool": ["reference/blocks/"],
    },
    "es/": {
        "qué es una tabla de bloques": ["phase-03-paged-cache/theory/02-block-tables/", GLOSSARY],
        "cómo instalar": ["setup/"],
        "tiempo hasta el primer token": [GLOSSARY],
        "¿necesito una GPU?": ["questions/", "reference/gpu/"],
        "decodificación especulativa": ["phase-09-chunked-prefill/theory/04-speculative-decoding/"],
        "lotes continuos": ["phase-05-continuous-batching/"],
        "inanición": [GLOSSARY],
        "beam search": [GLOSSARY],
        "métricas de Prometheus": ["reference/metrics/"],
        "docker": ["reference/deployment/"],
    },
}
FIRST = """new Promise((resolve) => {
  const input = document.querySelector(".md-search__input");
  const list = document.querySelector(".md-search-result__list");
  const look = () => list.querySelector("a") && (watching.disconnect(), resolve(list.querySelector("a").href));
  const watching = new MutationObserver(look);
  list.replaceChildren();
  watching.observe(list, { childList: true, subtree: true });
  document.querySelector("[data-md-toggle=search]").checked = true;
  input.focus();
  input.value = %s;
  input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile"), "--window-size=1400,950") as browser:
        yield browser


@pytest.mark.parametrize("prefix", QUESTIONS)
def test_what_answers_a_question_comes_first(browser: Chromium, address: str, prefix: str) -> None:
    browser.requests.clear()
    browser.open(address + prefix)
    assert not any(url.endswith("/documents.json") for url in browser.requests)
    wrong = {}
    for question, answers in QUESTIONS[prefix].items():
        found = str(browser.evaluate(FIRST % json.dumps(question))).removeprefix(address + prefix)
        if found.partition("?")[0].partition("#")[0] not in answers:
            wrong[question] = found
    assert wrong == {}
