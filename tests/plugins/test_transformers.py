"""Our schedulers inside transformers' continuous batching, for real: MiniGPT as a Llama, greedy."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'minicache-course[hf]'")

import torch

from minicache.errors import PluginError
from minicache.plugins.compare import MAX_TOKENS, Counter, answer, make_prompts, run
from minicache.plugins.export import export_minigpt
from minicache.scheduler import SCHEDULERS
from minicache.scheduler.audit import Auditor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(9)


@pytest.fixture(scope="module")
def ours(prompts):
    return answer(prompts)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = export_minigpt(tmp_path_factory.mktemp("minigpt"))
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_gives_our_engines_answers(scheduler, prompts, ours):
    """The auditor of phase 6 watches. Memory runs out for the stages that reserve none."""
    theirs = run("transformers", scheduler, prompts)
    assert theirs.answers == ours
    assert (theirs.num_preempted > 0) == (scheduler not in ("static", "continuous"))


def manager_of(model, **options):
    """transformers' manager of continuous batching with our "fair" scheduler, and the counter that watches it."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from minicache.plugins.transformers import register

    counter = Counter()
    register("fair", scheduler="fair", observers=(Auditor(), counter))
    sizes = {"page_size": 16, "num_blocks": 40, "max_batch_tokens": 256, "max_requests_per_batch": 8}
    config = ContinuousBatchingConfig(scheduler_type="fair", use_async_batching=False, **sizes | options)
    greedy = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config), counter


def test_stop_tokens_refusals_and_a_client_that_leaves(model, prompts, ours):
    manager, _ = manager_of(model)
    stop = ours[0][5]
    stopped = ours[0][: ours[0].index(stop) + 1]
    manager.start()
    try:
        manager.add_request(prompts[0], request_id="stop", max_new_tokens=MAX_TOKENS, eos_token_id=stop)
        manager.add_request(prompts[1], request_id="leaves", max_new_tokens=150)
        manager.add_request(prompts[2], request_id="whole", max_new_tokens=MAX_TOKENS)
        manager.add_request(prompts[3], request_id="large", max_new_tokens=500)
        outputs = {}
        while outputs.keys() != {"stop", "whole", "large"}:
            output = manager.get_result(timeout=60)
            outputs[output.request_id] = output
            if "stop" in outputs:
                manager.cancel_request("leaves")
    finally:
        manager.stop(block=True, timeout=60)
    assert list(outputs["stop"].generated_tokens) == stopped
    assert list(outputs["whole"].generated_tokens) == ours[2]
    assert "'large' may have" in outputs["large"].error


def test_memory_is_the_engines():
    from minicache.plugins.transformers import register

    with pytest.raises(PluginError, match="num_blocks, preemption"):
        register(scheduler="paged", preemption="swap", num_blocks=3)
