"""The options of an engine, once: names, defaults, bounds and help.

`LLM` takes them as keywords, an engine's process gets them as a message (`minicache.serving.replica.messages`), and the
command line's options are made from them (`minicache_cli.options`). No phase builds this module, and it imports none
that one builds: `minicache serve --mine` looks at it before the learner's files take their places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

DType = Literal["float32", "float16", "bfloat16"]
KVCacheDType = Literal["int8", "fp8_e4m3"]
WeightDType = Literal["int8", "int4"]
Preemption = Literal["recompute", "swap"]
TierPolicy = Literal["write_through", "write_back"]

BATCH, MODEL, PROCESSES = "Cache and batch", "Model and device", "Processes"


@dataclass(frozen=True)
class Face:
    """How an option differs where a command asks for it.

    Attributes:
        why: the reason.
        default: another default; ...: the engine's.
        help: another help text; "": the engine's.
        is_left_out: whether the command does not ask for it.
    """

    why: str
    default: Any = ...
    help: str = ""
    is_left_out: bool = False


@dataclass(frozen=True)
class Option:
    """What a command line tells of an option.

    Attributes:
        help: one line.
        metavar: what its value is called; numbers are N.
        at_least: the lowest value.
        flag: its name there; "": the field's.
        panel: under which heading it is listed; None: the first.
        faces: command → how it differs there.
    """

    help: str
    metavar: str | None = None
    at_least: int | None = None
    flag: str = ""
    panel: str | None = None
    faces: Mapping[str, Face] = field(default_factory=dict)


def option(help: str, metavar: str | None = None, *, panel: str | None = None, **more: Any) -> dict[str, Option]:
    """A field's metadata: an `Option`, whose faces are keywords too."""
    faces: dict[str, Face] = {name: more.pop(name) for name in ("serve", "fleet", "simulate") if name in more}
    metavar = "N" if metavar is None and "at_least" in more else metavar
    return {"option": Option(help, metavar, panel=panel, faces=faces, **more)}


_NO_MODEL = Face("in simulated time no model runs", is_left_out=True)

_REPEATS = Face("what a server is sent begins alike", default=True)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is made: what `LLM` takes as keywords. Where a name stands here, `LLM` also takes the thing itself.

    Attributes:
        model: a short name ("minigpt", "smollm2": `minicache.model.shelf`), the path of a checkpoint of
            `minicache train`, of a Hugging Face folder or of a GGUF file, a hub name ("org/name"); or a model
            (`minicache.engine.kv.Model`).
        scheduler: the name of a stage; or a `Scheduler`, whose pool and limits then replace the options from num_blocks
            to reserve_full_prompt.
        cache: "paged": blocks; "dense": a `KVCache` for each request, which neither swaps nor shares.
        num_blocks: blocks of the cache. None: as many as 64 MiB hold, or 16,384 tokens if that is more; on a GPU as
            gpu_memory_utilization says; but at least for one request of max_model_len tokens and at most for
            max_num_seqs such. In a model with sliding windows, a block is of one group of layers
            (`docs/en/reference/groups.md`).
        block_size: tokens of a block. This and the other options up to reserve_full_prompt are passed on to
            `minicache.scheduler.create_scheduler`, which documents them.
        max_model_len: the most tokens of a request, prompt and answer. None: what the model can.
        kv_cache_dtype: keys and values in one byte a number, with a scale for each token and head
            (`minicache.cache.quantized`): the same memory holds two to four times as many tokens. Such a cache is
            paged. None: in the dtype of the weights.
        kv_tiers: where full blocks outlive the prefix cache, the fastest first: "cpu:SIZE", "disk:PATH",
            "disk:PATH?max=SIZE" or "redis://HOST:PORT" (`minicache.tiers.specs`); for `LLM` also a `Tier`. Given any,
            prefix_caching is on. None: nowhere.
        kv_tier_policy: when a block is stored there: "write_through", once it is full, which outlives a restart; or
            "write_back", once it is evicted from the cache.
        dtype: of the weights, for `LLM` a `torch.dtype`; None: float32 on a CPU, 16 bits on a GPU
            (`minicache.engine.loading.load_model`). A model that is given has its own.
        weight_dtype: round the weights of linear layers, as they are loaded, to int8 or to four bits, with a scale for
            each 32 (`minicache.kernels.group_quantize`): less memory, and less to read for each token. dtype is what is
            computed in. None: they stay as they are.
        device: of the weights; None: the CPU. A model that is given has its own.
        gpu_memory_utilization: what part of a GPU's free memory the cache takes, once weights and the largest step
            have theirs (`minicache.engine.runners.find`). It counts if num_blocks is None.
        enforce_eager: on a GPU, decode without CUDA graphs (`minicache.engine.runners.gpu`): slower, and nothing has to
            be captured.
        tensor_parallel_size: over how many processes the model is divided (`minicache.parallel`), this one included; on
            GPUs each takes one. What is counted in bytes is of each of them.
        async_scheduling: schedule a step while the model runs the one before (`minicache.engine.overlap`). With
            scheduler "chunked", or an `AsyncChunkedScheduler`, and a paged cache; neither with several processes nor
            with speculative. Answers do not change.
        speculative: where draft tokens come from: "ngram", a draft model ("minigpt-draft", or as `model`), or a
            `SpeculativeConfig`, which says how many; None: there are none. With scheduler "chunked", or a
            `SpeculativeScheduler`, and a paged cache. Answers do not change, and come in fewer steps
            (`minicache.engine.drafting`).
    """

    model: str = field(
        default="minigpt",
        metadata=option(
            '"minigpt", "smollm2", a checkpoint, a GGUF file, a Hugging Face folder, or "org/name".',
            "MODEL",
            simulate=Face("it simulates published models, by names of its own", is_left_out=True),
        ),
    )
    scheduler: str = field(
        default="chunked",
        metadata=option(
            "Scheduler: static, continuous, paged, fair or chunked.",
            "STAGE",
            panel=BATCH,
            simulate=Face("it has Orca's schedulers too", is_left_out=True),
        ),
    )
    cache: Literal["paged", "dense"] = field(
        default="paged",
        metadata=option(
            "The KV cache: paged or dense.",
            "KIND",
            panel=BATCH,
            serve=Face("the server's page and metrics are of blocks", is_left_out=True),
            simulate=_NO_MODEL,
        ),
    )
    num_blocks: int | None = field(
        default=None,
        metadata=option(
            "Number of cache blocks; default: 64 MiB or 16,384 tokens, the larger.",
            at_least=1,
            panel=BATCH,
            fleet=Face("there are several engines", help="Cache blocks per replica; default: 64 MiB or 16,384 tokens."),
            simulate=Face(
                "the machine is simulated", help="Number of cache blocks; default: the memory that the weights leave."
            ),
        ),
    )
    block_size: int = field(default=16, metadata=option("Tokens per block.", at_least=1, panel=BATCH))
    max_num_seqs: int = field(
        default=256,
        metadata=option(
            "Batch slots: maximum running requests.",
            at_least=1,
            panel=BATCH,
            fleet=Face("a fleet shows its router on few requests", default=16, help="Batch slots per replica."),
        ),
    )
    max_num_batched_tokens: int = field(
        default=8192,
        metadata=option(
            "Token budget of a step.",
            at_least=1,
            panel=BATCH,
            simulate=Face(
                "no prompt of a workload is refused",
                default=None,
                help="Token budget of a step; default: 8192, or the longest prompt.",
            ),
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            "Maximum tokens of a request; default: the model's.",
            at_least=2,
            panel=BATCH,
            simulate=Face("the workload has one", is_left_out=True),
        ),
    )
    preemption: Preemption = field(
        default="recompute", metadata=option("How to preempt: recompute or swap.", "HOW", panel=BATCH)
    )
    num_host_blocks: int = field(
        default=0,
        metadata=option(
            "CPU swap space, in blocks.",
            at_least=0,
            panel=BATCH,
            simulate=Face(
                "simulated memory costs nothing",
                default=None,
                help="CPU swap space, in blocks; default: as many as on the device.",
            ),
        ),
    )
    watermark: float = field(
        default=0.0, metadata=option("Fraction of the blocks that an admission must leave free.", "X", panel=BATCH)
    )
    prefix_caching: bool = field(
        default=False,
        metadata=option(
            "Disable the prefix cache.",
            panel=BATCH,
            serve=_REPEATS,
            simulate=Face(
                _REPEATS.why, default=True, help="Disable the prefix cache (used where prompts have tokens)."
            ),
        ),
    )
    long_prefill_threshold: int = field(
        default=0,
        metadata=option(
            "Maximum prompt tokens of one request in a step with others (chunked); 0: no limit.",
            at_least=0,
            panel=BATCH,
            serve=Face(
                "one client's long prompt must not take the whole step",
                default=None,
                help="Maximum prompt tokens of one request in a step with others; 0: no limit; default: 512 (chunked).",
            ),
        ),
    )
    reserve_full_prompt: bool = field(
        default=True, metadata=option("Admit a request when its first chunk's blocks are free (chunked).", panel=BATCH)
    )
    async_scheduling: bool = field(
        default=False,
        metadata=option(
            "Schedule each step while the model runs the one before (chunked).",
            panel=BATCH,
            simulate=Face("in simulated time scheduling takes none", is_left_out=True),
        ),
    )
    kv_cache_dtype: KVCacheDType | None = field(
        default=None,
        metadata=option(
            "Quantize keys and values to one byte: int8 or fp8_e4m3; default: the weights' type.",
            "DTYPE",
            panel=BATCH,
            simulate=Face(
                "published models have 16 bits",
                help="Quantize keys and values to one byte: int8 or fp8_e4m3; default: 16 bits.",
            ),
        ),
    )
    kv_tiers: list[str] | None = field(
        default=None,
        metadata=option(
            "Keep full blocks in a tier too: cpu:SIZE, disk:PATH[?max=SIZE] or redis://HOST:PORT. May be repeated.",
            "TIER",
            flag="--kv-tier",
            panel=BATCH,
            simulate=Face(
                "no folder is opened, and no server asked",
                help="Simulate a tier, as for serve: cpu:SIZE, disk:PATH[?max=SIZE] or redis://HOST:PORT. May be "
                "repeated.",
            ),
        ),
    )
    kv_tier_policy: TierPolicy = field(
        default="write_through",
        metadata=option(
            "When a block goes to the tiers: write_through (full) or write_back (evicted).",
            "WHEN",
            panel=BATCH,
        ),
    )
    dtype: DType | None = field(
        default=None,
        metadata=option(
            "Weights in float32, float16 or bfloat16; default: float32, on a GPU 16 bits.",
            "DTYPE",
            panel=MODEL,
            simulate=_NO_MODEL,
        ),
    )
    weight_dtype: WeightDType | None = field(
        default=None,
        metadata=option(
            "Quantize the weights: int8 or int4, for less memory and faster decoding; default: no.",
            "DTYPE",
            panel=MODEL,
            simulate=_NO_MODEL,
        ),
    )
    device: str | None = field(
        default=None, metadata=option('"cpu" or "cuda"; default: cpu.', "DEVICE", panel=MODEL, simulate=_NO_MODEL)
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata=option("Fraction of the GPU's free memory for the cache.", "X", panel=MODEL, simulate=_NO_MODEL),
    )
    enforce_eager: bool = field(
        default=False, metadata=option("Decode without CUDA graphs (GPU only).", panel=MODEL, simulate=_NO_MODEL)
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=option(
            "Processes per engine for tensor parallelism; on GPUs, one GPU each.",
            at_least=1,
            flag="--tensor-parallel",
            panel=PROCESSES,
            simulate=_NO_MODEL,
        ),
    )
    speculative: str | None = field(
        default=None,
        metadata=option(
            'Drafter: "ngram", "minigpt-draft" or another draft model; default: none.',
            "MODEL",
            panel=MODEL,
            simulate=_NO_MODEL,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(EngineOptions):
    """How a process with an engine is made: the engine's options, as they fit into JSON, and the process's own.

    Attributes:
        num_speculative_tokens: the most draft tokens of a request in one step (`SpeculativeConfig`).
        num_threads: of PyTorch; None: 1 for a small model, else PyTorch's own choice.
    """

    num_speculative_tokens: int = field(
        default=4, metadata=option("Maximum draft tokens per request and step.", at_least=1, panel=MODEL)
    )
    num_threads: int | None = field(
        default=None,
        metadata=option("CPU threads per engine; default: 1 for a small model, else all.", at_least=1, panel=PROCESSES),
    )


def with_options(method: Callable[..., Any]) -> inspect.Signature:
    """A method's signature, with the engine's options in the place of its `**options`: `help` shows their names."""
    parameters = dict(inspect.signature(method).parameters)
    del parameters["options"]
    for each in fields(EngineOptions):
        if each.name not in parameters:
            parameters[each.name] = inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
            )
    return inspect.Signature(list(parameters.values()))
