"""What constrained answers gain and cost on a real model: SmolLM2-135M-Instruct asked for JSON at temperature 1.

    minicache pull smollm2
    python -m benchmarks.constraints

NUM_PROMPTS chat prompts each describe a thing and ask for a JSON object of SCHEMA, whose keys the prompt explains. They
are answered free, and with `json_schema`; BATCH at a time. Then BATCHES of requests write NUM_NEW tokens each, free and
constrained to a JSON text that does not end before; the ways take turns, REPEATS times. Seconds are those of the clock:
masks are computed while the model runs.

Keys of results/constraints.json: `prompts`, `max_tokens`; `.free` and `.constrained`: valid (answers that are JSON as a
whole), valid_inside (the same, or JSON from the first brace to the last), of_schema (valid, with the keys and types of
SCHEMA), stopped (answers that ended before max_tokens), tokens, tokens_per_second. `.speed.batch_N`: free, constrained
(tokens_per_second, best of REPEATS), slower_percent. mask_ms: one mask of SCHEMA, the mean along the answers.
compile_ms: SCHEMA, after the vocabulary was read; vocabulary_ms: that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from rich.progress import track

from benchmarks._record import record
from minicache.engine.answers import Completion
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams

NUM_PROMPTS: Final = 100
MAX_TOKENS: Final = 96
BATCH: Final = 20
BATCHES: Final = (1, 16)
NUM_NEW: Final = 32
REPEATS: Final = 3

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["animal", "plant", "tool", "food", "place"]},
        "weight_kg": {"type": "integer", "minimum": 0, "maximum": 9999},
        "colors": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "kind", "weight_kg", "colors"],
    "additionalProperties": False,
}
ENDLESS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    "minItems": 1000,
}

THINGS: Final = """
apple axe badger banana basil beach birch bread bridge broom cactus candle castle cheese chisel clover cow
crane daisy desert donkey duck eagle fern fig forest fox garlic goat hammer harbour hedgehog honey horse
island ivy kettle knife lake lamb lemon library lion lily maple market mill mint mouse mushroom needle oak
olive onion otter owl pear pepper pigeon pine plum pond potato rabbit raven rice river rose rye saddle sage
salmon saw scissors shovel snail soup spade sparrow spoon squirrel swan tavern thistle tiger toad tomato
tower trout tulip turnip valley walnut weasel well whale wheat willow wolf wren
"""


def main() -> None:
    llm = LLM("smollm2", max_num_seqs=BATCH, max_model_len=512)
    tokenizer: Any = llm.tokenizer
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": question(each)}]) for each in THINGS.split()]
    assert len(prompts) == NUM_PROMPTS
    figures: dict[str, Any] = {"prompts": NUM_PROMPTS, "max_tokens": MAX_TOKENS}
    schema = json.dumps(SCHEMA)
    figures["vocabulary_ms"] = 1000 * seconds_of(lambda: llm.grammars.compile(SamplingParams(regex="a")))
    figures["compile_ms"] = round(
        1000 * seconds_of(lambda: llm.grammars.compile(SamplingParams(json_schema=schema))), 1
    )
    figures["vocabulary_ms"] = round(figures["vocabulary_ms"], 1)
    ways: dict[str, dict[str, Any]] = {"free": {}, "constrained": {"json_schema": schema}}
    for way, constraint in ways.items():
        answers: list[Completion] = []
        params = [SamplingParams(MAX_TOKENS, temperature=1.0, seed=seed, **constraint) for seed in range(NUM_PROMPTS)]
        took = seconds_of(lambda params=params, answers=answers: answers.extend(llm.generate(prompts, params)))  # type: ignore[misc]
        figures[way] = judged(answers) | {"tokens_per_second": round(sum(map(num_tokens, answers)) / took, 1)}
        print(way, figures[way])
    figures["mask_ms"] = round(mask_ms(llm, params[0], answers), 3)
    figures["speed"] = {f"batch_{size}": speeds(llm, prompts[:size]) for size in track(BATCHES, "speed")}
    print(figures["speed"])
    record("constraints", figures)


def question(thing: str) -> str:
    """What one prompt asks."""
    return (
        f"Describe this thing: {thing}. Answer with nothing but a JSON object with the keys name (a string), kind "
        f"(animal, plant, tool, food or place), weight_kg (a whole number) and colors (a list of up to three strings)."
    )


def judged(answers: list[Completion]) -> dict[str, Any]:
    """How many of them are JSON."""
    texts = [each.text.strip() for each in answers]
    inside = [text[text.find("{") : text.rfind("}") + 1] for text in texts]
    return {
        "valid": sum(parsed(text) is not None for text in texts),
        "valid_inside": sum(
            parsed(text) is not None or parsed(cut) is not None for text, cut in zip(texts, inside, strict=True)
        ),
        "of_schema": sum(is_of_schema(parsed(text)) for text in texts),
        "stopped": sum(each.finish_reason == "stop" for each in answers),
        "tokens": sum(map(num_tokens, answers)),
    }


def num_tokens(answer: Completion) -> int:
    return len(answer.token_ids)


def parsed(text: str) -> Any:
    """The JSON of a text; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_of_schema(found: Any) -> bool:
    """A reading of SCHEMA that has nothing in common with llguidance's."""
    return (
        isinstance(found, dict)
        and found.keys() == {*SCHEMA["properties"]}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 24
        and found["kind"] in ("animal", "plant", "tool", "food", "place")
        and isinstance(found["weight_kg"], int)
        and 0 <= found["weight_kg"] <= 9999
        and isinstance(found["colors"], list)
        and len(found["colors"]) <= 3
        and all(isinstance(each, str) and len(each) <= 12 for each in found["colors"])
    )


def speeds(llm: LLM, prompts: list[list[int]]) -> dict[str, float]:
    """Tokens a second of a batch, free and constrained, one after the other."""
    free = SamplingParams(NUM_NEW, temperature=1.0, seed=0, ignore_eos=True)
    constrained = SamplingParams(NUM_NEW, temperature=1.0, seed=0, json_schema=json.dumps(ENDLESS))
    best = {"free": float("inf"), "constrained": float("inf")}
    for _ in range(REPEATS):
        for way, params in (("free", free), ("constrained", constrained)):
            best[way] = min(best[way], seconds_of(lambda params=params: llm.generate(prompts, params)))  # type: ignore[misc]
    per_second = {way: round(len(prompts) * NUM_NEW / took, 1) for way, took in best.items()}
    slower = round(100 * (best["constrained"] / best["free"] - 1), 1)
    return per_second | {"slower_percent": slower}


def mask_ms(llm: LLM, params: SamplingParams, answers: list[Completion]) -> float:
    """Milliseconds of one mask, its token read first: the mean along some answers."""
    took, num_masks = 0.0, 0
    for answer in answers:
        matcher = llm.grammars.constraint(params).matcher
        for token_id in answer.token_ids:
            took += seconds_of(lambda matcher=matcher: matcher.compute_bitmask())  # type: ignore[misc]
            took += seconds_of(lambda matcher=matcher, token_id=token_id: matcher.consume_token(token_id))  # type: ignore[misc]
            num_masks += 1
    return 1000 * took / num_masks


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of the clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
