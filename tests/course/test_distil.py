"""`minicache distil`: the one file is short, needs nothing of the package, and computes what the package does."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import libcst as cst
import pytest
import torch
from safetensors.torch import save_file

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model.decoder import Decoder, DecoderConfig
from minicache_course.distil.fold import drop_parameters
from minicache_course.distil.sources import Definition
from minicache_course.distil.write import MAX_LINES, distilled
from minicache_course.errors import CourseError
from minicache_course.table import load_course
from minicache_course.workspace import PACKAGES, SOURCES, fingerprint, reference_file

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "scheduler" / "golden" / "first_come.json.gz"


@pytest.fixture(scope="module")
def engine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command prints, where the packages are installed without a clone."""
    site = tmp_path_factory.mktemp("site")
    for package in PACKAGES:
        shutil.copytree(SOURCES / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = "from minicache_cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", command, "distil"], capture_output=True, text=True, check=True, cwd=site, env=environment
    )
    file = tmp_path_factory.mktemp("engine") / "my_engine.py"
    file.write_text(done.stdout, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def engine(engine_file: Path) -> ModuleType:
    """The one file, imported."""
    return load(engine_file)


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random Llama."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
    torch.manual_seed(1)
    model = Decoder(
        DecoderConfig(**sizes, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=128, norm_eps=1e-5)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim < 2 else 0.0, std=0.4)
    folder = tmp_path_factory.mktemp("llama")
    names = {name: name if name.startswith("lm_head") else f"model.{name}" for name, _ in model.named_parameters()}
    save_file({names[name]: tensor.detach() for name, tensor in model.named_parameters()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        **sizes,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [5, 6],
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_file_is_short_and_imports_torch_and_safetensors_only(engine_file: Path) -> None:
    text = engine_file.read_text(encoding="utf-8")
    assert 1500 < text.count("\n") <= MAX_LINES == 2000
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module).split(".")[0])
    assert modules - sys.stdlib_module_names == {"torch", "safetensors", "tokenizers"}


def test_the_file_is_laid_out_and_uses_all_that_it_imports(engine_file: Path) -> None:
    options = ["--isolated", "--line-length=120", str(engine_file)]
    lint = ["check", "--select=E,F,I,B,UP,SIM", "--target-version=py311"]
    for command in (lint, ["format", "--check", "--diff"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_no_stage_is_left_and_no_call_of_another(engine_file: Path) -> None:
    tree = ast.parse(engine_file.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert [name for name in classes if name.endswith("Scheduler")] == ["ChunkedPrefillScheduler"]
    assert "super" not in ast.dump(classes["ChunkedPrefillScheduler"])
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    assert raised == {"MinicacheError", "OutOfBlocksError", "RequestTooLargeError", "UnsupportedModelError"}


def test_it_schedules_as_vllm_does(engine: ModuleType) -> None:
    names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")
    num_steps = 0
    for workload in json.loads(gzip.decompress(GOLDEN.read_bytes())):
        for mode, expected in workload["steps"].items():
            scheduler = engine.ChunkedPrefillScheduler(
                reserve_full_prompt=mode == "full_prompt_must_fit", **{name: workload[name] for name in names}
            )
            coming = sorted((step, number) for number, (_, _, _, step) in enumerate(workload["requests"]))
            steps: list[Any] = []
            while coming or scheduler._requests:
                while coming and coming[0][0] <= len(steps):
                    arrival, number = coming.pop(0)
                    prefix, length, max_tokens, _ = workload["requests"][number]
                    prompt = [
                        p % 500 if p < prefix else (number * 7919 + p * 31 + 1) % 30000 + 500 for p in range(length)
                    ]
                    time = arrival + number * 1e-6
                    scheduler.add_request(engine.Request(str(number), prompt, max_tokens, arrival_time=time))
                output = scheduler.schedule()
                steps.append([dict(output.num_scheduled_tokens), output.preempted])
                scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
                assert len(steps) <= len(expected)
            assert steps == expected
            num_steps += len(steps)
    assert num_steps > 30_000


def test_nothing_is_left_of_what_this_engine_does_not_have(engine_file: Path) -> None:
    text = engine_file.read_text(encoding="utf-8")
    names = ("draft_token_ids", "num_placeholders", "other_block_ids", "blocks_to_load", "sliding_window", "scale=")
    of_the_course = ("phase ", "BlockTable", "addcmul_", "cast(", "chunks_prompts", "rotation_kinds", "_used(")
    assert [each for each in (*names, *of_the_course) if each in text] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "python FILE FOLDER PROMPT"), (["no/such/folder", "Hello"], "no/such/folder has no config.json: name the")],
)
def test_the_file_says_how_it_is_used(engine_file: Path, arguments: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, str(engine_file), *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_is_not_empty(engine: ModuleType, llama: Path) -> None:
    mine = engine.Engine(engine.load_llama(llama), None, **OPTIONS)
    with pytest.raises(engine.MinicacheError, match="at least one token"):
        mine.add_request([], engine.SamplingParams())
    assert not mine.answers


def test_of_parameters_those_go_that_every_call_passes_alike() -> None:
    text = """
def one(a: int, *, b: int | None = None, c: int = 0) -> int:
    if b is None:
        return a
    return b


def other(a: int) -> int:
    return one(a, c=a)
"""
    nodes = [each for each in cst.parse_module(text).body if isinstance(each, cst.FunctionDef)]
    definitions = [Definition("m", node.name.value, [node]) for node in nodes]
    drop_parameters(definitions, {"other"})
    code = [cst.Module([each.node]).code.strip() for each in definitions]
    assert code[0] == "def one(a: int) -> int:\n    return a"
    assert code[1] == "def other(a: int) -> int:\n    return one(a)"


OPTIONS = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24}


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """24 prompts, of which some begin alike, with greedy and drawn answers, some of several."""
    found = []
    for number in range(24):
        prompt = [(number % 3 * 31 + position * 7) % 90 + 7 for position in range(9)]
        prompt += [(number * 13 + position * 5) % 90 + 7 for position in range(number * 7 % 23 + 1)]
        params: dict[str, Any] = {"max_tokens": 8 + number % 5 * 7, "ignore_eos": number % 4 == 1}
        if number % 3:
            params |= {"temperature": 0.8, "seed": number, "top_k": number % 2 * 20, "top_p": 0.9 + number % 5 * 0.02}
        if number % 6 == 5:
            params["n"] = 3
        if number % 5 == 2:
            params["stop_token_ids"] = list(range(10, 20))
        found.append((prompt, params))
    return found


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_tokens_are_those_of_the_engine(engine: ModuleType, llama: Path, preemption: str) -> None:
    options = {**OPTIONS, "preemption": preemption, "num_host_blocks": 12 if preemption == "swap" else 0}
    prompts = [prompt for prompt, _ in requests()]
    llm = LLM(str(llama), scheduler="chunked", prefix_caching=True, **options)
    expected = llm.generate(prompts, [SamplingParams(**params) for _, params in requests()])
    mine = engine.Engine(engine.load_llama(llama), None, **options)
    answers = [
        answer for prompt, params in requests() for answer in mine.add_request(prompt, engine.SamplingParams(**params))
    ]
    while mine.answers:
        mine.step()
    assert [answer.request.output_token_ids for answer in answers] == [each.token_ids for each in expected]
    assert [answer.finish_reason for answer in answers] == [each.finish_reason for each in expected]
    assert {each.finish_reason for each in expected} == {"stop", "length"}
    assert sum(answer.request.num_preemptions for answer in answers) > 0
    assert mine.scheduler.stats.num_hit_tokens > 0


def test_it_runs_where_there_is_no_minicache(engine_file: Path, llama: Path) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({PACKAGES!r}))
import my_engine
engine = my_engine.Engine(my_engine.load_llama({str(llama)!r}), None)
[answer] = engine.generate([[8, 9, 10]], my_engine.SamplingParams(max_tokens=6, ignore_eos=True))
print(answer.request.output_token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=engine_file.parent
    )
    [expected] = LLM(str(llama)).generate([[8, 9, 10]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert json.loads(done.stdout) == expected.token_ids


def test_stop_strings_end_a_text_and_half_letters_are_held_back(engine: ModuleType) -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", "replace")

    stream = engine.TextStream(Bytes(), list(b"It"), ["END", "EX"])
    shown = [stream.push(token_id) for token_id in "é ENTEX!".encode()[:-1]]
    assert "".join(shown) == stream.text == "é ENT"
    assert stream.is_stopped
    plain = engine.TextStream(Bytes(), list(b"It"), [])
    assert [plain.push(token_id) for token_id in "é!".encode()] == ["", "é", "!"]


@pytest.mark.slow
def test_finished_files_are_taken_and_the_command_says_which(tmp_path: Path) -> None:
    (tmp_path / "labs").mkdir()
    shutil.copy(ROOT / "labs" / "course.toml", tmp_path / "labs")
    course = load_course(tmp_path / "labs" / "course.toml")
    tasks = {}
    for module, edit in {
        "minicache.memory.blocks": ("def free(self, block_ids", "def free(self, block_ids"),
        "minicache.scheduler.queue": ("class LazyHeap:", "class LazyHeap:  # mine"),
        "minicache.kernels.plain": ("def gather_kv(", "def gather_kv(  # begun"),
    }.items():
        phase = next(phase for phase in course if module in phase.files)
        file = tmp_path / "labs" / phase.folder / phase.files[module]
        file.parent.mkdir(parents=True, exist_ok=True)
        text = reference_file(module).read_text(encoding="utf-8").replace(*edit)
        file.write_text(text + "\n\ndef never_called() -> int:\n    return 1\n", encoding="utf-8")
        if module != "minicache.kernels.plain":
            for task in phase.tasks:
                if task.module == module:
                    record = {"outcome": "passed", "earned": 1, "sha256": fingerprint(file), "graded_at": "now"}
                    tasks[task.id] = record
    (tmp_path / ".minicache").mkdir()
    (tmp_path / ".minicache" / "progress.json").write_text(json.dumps({"tasks": tasks, "hints": {}}))
    command = [sys.executable, "-c", "from minicache_cli import main; main()", "distil", "--mine"]
    environment = {**os.environ, "LANGUAGE": "en", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stderr.splitlines() == [
        "yours: labs/phase-03-paged-cache/memory/blocks.py",
        "reference, not labs/phase-03-paged-cache/kernels/plain.py: not passed yet: task 3.5, 3.7",
        "yours: labs/phase-07-fairness/scheduler/queue.py",
        "reference: all files that you have not started",
    ]
    assert "These modules are the learner's: memory/blocks, scheduler/queue;" in done.stdout
    assert "class LazyHeap:  # mine" in done.stdout
    assert "begun" not in done.stdout
    assert "never_called" not in done.stdout


def test_without_libcst_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['libcst'] = None; from minicache_cli import main; sys.argv[1:] = ['distil']; main()"
    environment = {**os.environ, "LANGUAGE": "en"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == "minicache: libcst is not installed: pip install 'minicache-course[course]'\n"


VARIANTS = {
    "minicache.scheduler.queue": (
        ("from heapq import heappop, heappush", "import heapq"),
        ("heappush(self._heap, (key, request_id))", "heapq.heappush(self._heap, (key, request_id))"),
        ("            heappop(heap)", "            heapq.heappop(heap)"),
    ),
    "minicache.memory.blocks": (
        (
            "        block_ids = []\n        for _ in range(count):",
            "        if count < 0:\n            raise ValueError(count)\n"
            "        elif count > 2**40:\n            raise ValueError(count)\n"
            "        else:\n            block_ids = empty()\n        for _ in range(count):",
        ),
        ("class FreeList(Protocol):", "def empty():\n    # Mine.\n    return []\n\n\nclass FreeList(Protocol):"),
    ),
    "minicache.scheduler.paged": (
        ("        super().admit(request, output)\n", "        super().admit(request, output=output)\n"),
        ("class AllocStatus(Enum):", "def _attend(batch):\n    batch.pop()\n\n\nclass AllocStatus(Enum):"),
        ("        self.running.pop()\n", "        _attend(self.running)\n"),
    ),
    "minicache.kernels.plain": (
        (
            "    num_blocks = -(-num_tokens // cache.shape[1])\n",
            "    from minicache.memory.blocks import blocks_for\n\n"
            "    num_blocks = blocks_for(num_tokens, cache.shape[1])\n",
        ),
    ),
}
"""Other ways to write the same: module → what is replaced by what."""


@pytest.mark.slow
def test_files_that_are_written_otherwise_compute_the_same(tmp_path: Path) -> None:
    files = {}
    for module, edits in VARIANTS.items():
        text = reference_file(module).read_text(encoding="utf-8")
        for old, new in edits:
            assert old in text
            text = text.replace(old, new, 1)
        files[module] = tmp_path / f"{module}.py"
        files[module].write_text(text, encoding="utf-8")
    text = distilled(files)
    assert "raise ValueError" not in text
    assert "from minicache" not in text
    assert "# Mine." in text
    assert text.count("def _attend(") == 1
    file = tmp_path / "variant.py"
    file.write_text(text, encoding="utf-8")
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=E9,F", str(file)]
    assert subprocess.run(lint, capture_output=True).returncode == 0
    variant = load(file)
    test_it_schedules_as_vllm_does(variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from minicache.fleet.router import Router\n\nROUTER = Router\n", "uses Router of minicache.fleet.router"),
        ("def (", "cannot be read as Python"),
    ],
)
def test_a_file_that_cannot_be_taken_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "blocks.py"
    text = reference_file("minicache.memory.blocks").read_text(encoding="utf-8")
    used = text.replace(
        "        self.ref_counts = [0] * num_blocks", "        self.ref_counts = [0] * num_blocks\n        ROUTER"
    )
    file.write_text(used + line, encoding="utf-8")
    with pytest.raises(CourseError, match=f"{file.name}.*{says}"):
        distilled({"minicache.memory.blocks": file})
