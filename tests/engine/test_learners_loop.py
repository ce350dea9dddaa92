"""A learner's `engine/loop.py` serves the final engine: forks, chunks of prompts, a prefix cache, draft tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache_course.workspace import reference_file

PROMPTS = ["Yesterday I", "the cat saw the dog and the cat saw the", "They"]
OPTIONS: dict[str, dict[str, object]] = {
    "forks and chunks": {"max_num_batched_tokens": 8, "prefix_caching": True, "num_blocks": 60, "block_size": 4},
    "draft tokens": {"speculative": "ngram", "num_blocks": 60, "block_size": 4},
    "two ranks": {"tensor_parallel_size": 2, "num_blocks": 60},
}
CODE = """
import json, sys
from pathlib import Path
from minicache_course.finder import install
install({"minicache.engine.loop": Path(sys.argv[1])})
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
llm = LLM(**json.loads(sys.argv[3]))
params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, n=2, stop="cat")
answers = llm.generate(json.loads(sys.argv[2]), params)
print(json.dumps([sorted(llm.calls), [[each.token_ids, each.text, each.finish_reason] for each in answers]]))
"""
COUNTED = """

def _counted(name):
    function = getattr(EngineLoop, name)
    def counting(self, *args):
        EngineLoop.calls.add(name)
        return function(self, *args)
    return counting

EngineLoop.calls = set()
for _name in ("step", "run_model", "pick", "emit"):
    setattr(EngineLoop, _name, _counted(_name))
"""


@pytest.mark.parametrize(
    ("engine", "mine"),
    [
        ("forks and chunks", ["emit", "pick", "run_model", "step"]),
        ("draft tokens", ["emit", "pick", "step"]),
        ("two ranks", ["emit", "pick", "step"]),
    ],
)
@pytest.mark.slow
def test_a_learners_loop_serves_the_final_engine(tmp_path: Path, engine: str, mine: list[str]) -> None:
    file = tmp_path / "loop.py"
    file.write_text(reference_file("minicache.engine.loop").read_text() + COUNTED)
    options = OPTIONS[engine]
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(file), json.dumps(PROMPTS), json.dumps(options)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    called, answers = json.loads(run.stdout)
    assert called == mine
    llm = LLM(num_blocks=60)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, n=2, stop="cat")
    assert answers == [[each.token_ids, each.text, each.finish_reason] for each in llm.generate(PROMPTS, params)]
