"""A model in a Hugging Face folder: config.json says what it is made of, safetensors hold its weights.

What this package computes is read, and all else is refused by name before a weight is loaded: a model that is computed
almost right gives text that is almost right, and no one would know why. Pickles are not read at all: loading one can
run code. No phase builds this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minicache.errors import CheckpointError, UnsupportedModelError
from minicache.model.assembling import Settle, assemble, check_tensors, without_memory
from minicache.model.decoder import Decoder, DecoderConfig, LinearScaling, Llama3Scaling
from minicache.model.fields import MAX_LAYERS, MAX_POSITIONS, MAX_TOKEN_ID, Fields, one_of

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json: "
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STORED: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # as safetensors calls them


@dataclass(frozen=True)
class Family:
    """What a family's models have that their config.json does not say.

    Attributes:
        qkv_bias: queries, keys and values have a bias; None: as `attention_bias` says, and then the output too.
        mlp_bias: the feed-forward block may have biases, as `mlp_bias` says.
        qk_norm: queries and keys are normed.
        windows: who has a sliding window: "no" layer; "all"; "some", those that `layer_types` names or, without it,
            those from `max_window_layers` on, if `use_sliding_window` says so; or "most", those that `layer_types`
            names or, without it, all but each `sliding_window_pattern`-th.
        head_dim: of a config that gives none; None: hidden_size / num_attention_heads.
        num_kv_heads: likewise; None: as many as query heads.
        max_seq_len: likewise; None: a config says it.
        is_tied: likewise, whether the output layer is the embedding.
        is_gemma: the models are built as Gemma 3.
    """

    qkv_bias: bool | None = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: str = "no"
    head_dim: int | None = None
    num_kv_heads: int | None = None
    max_seq_len: int | None = None
    is_tied: bool = False
    is_gemma: bool = False


GEMMA_3: Final = Family(
    qkv_bias=None,
    qk_norm=True,
    windows="most",
    head_dim=256,
    num_kv_heads=4,
    max_seq_len=131_072,
    is_tied=True,
    is_gemma=True,
)
FAMILIES: Final = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias=True),
    "MistralForCausalLM": Family(windows="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, windows="some", head_dim=128),
    "Gemma3ForCausalLM": GEMMA_3,
}
"""The models that are computed, by what a config.json calls their architecture."""


# What a config says


def decoder_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read what a config.json says of a model; weights are not needed for it.

    A field that is missing has the value that `transformers` gives it. Sizes may not be missing.

    Args:
        config: the content of config.json, of this or an older `transformers`.
        generation: the content of generation_config.json, whose end tokens count for more; None: there is none.

    Returns:
        The model's shape.

    Raises:
        UnsupportedModelError: it asks for what is not computed here; the message says which field, and what would do.
        CheckpointError: a field has a value that no model can have, or is missing.
    """
    fields = Fields(config, CONFIG)
    family = _family(fields)
    if not family.is_gemma:
        fields.require("hidden_act", "silu", default="silu")
    if fields.get("quantization_config") is not None:
        method = fields.get("quantization_config")
        method = method.get("quant_method", method) if isinstance(method, Mapping) else method
        raise fields.unsupported("quantization_config", method, f"weights that are not quantised: {one_of(DTYPES)}")
    num_layers = fields.count("num_hidden_layers", at_most=MAX_LAYERS)
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    all_bias = family.qkv_bias is None and fields.flag("attention_bias")
    try:
        return DecoderConfig(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", family.num_kv_heads or num_heads),
            head_dim=fields.count("head_dim", family.head_dim or max(1, hidden_size // num_heads)),
            max_seq_len=fields.count("max_position_embeddings", family.max_seq_len, at_most=MAX_POSITIONS),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            **(_gemma(fields) if family.is_gemma else _rope(fields)),
            attention_bias=all_bias or bool(family.qkv_bias),
            output_bias=all_bias,
            mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            tie_word_embeddings=fields.flag("tie_word_embeddings", family.is_tied),
            sliding_windows=_windows(fields, family, num_layers),
            end_token_ids=_end_token_ids(config, generation),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: no model can have this shape: {error}") from error


def _family(fields: Fields) -> Family:
    """The family whose architecture a config names."""
    architectures = fields.get("architectures")
    match architectures:
        case [str(name)] if name in FAMILIES:
            return FAMILIES[name]
    raise fields.unsupported("architectures", architectures, one_of(FAMILIES))


def _gemma(fields: Fields) -> dict[str, Any]:
    """What is Gemma 3's own, by its names in `DecoderConfig`.

    Layers with a window turn by another base than the others, and are not stretched. Newer configs have a set of
    `rope_parameters` for each of the two kinds; older ones `rope_local_base_freq`, and the others' by the usual names.
    """
    fields.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    fields.require("attn_logit_softcapping", None)
    fields.require("final_logit_softcapping", None)
    fields.require("use_bidirectional_attention", False, default=False)
    kinds, local_theta = fields.get("rope_parameters"), fields.number("rope_local_base_freq", 10_000.0)
    if isinstance(kinds, Mapping) and any(isinstance(values, Mapping) for values in kinds.values()):
        name = "rope_parameters.sliding_attention"
        local = _rope_values(fields, name, kinds.get("sliding_attention", {}), local_theta)
        if "rope_scaling" in local:
            raise fields.unsupported(name, kinds["sliding_attention"], 'the rope_type "default"')
        rope = _rope_values(fields, "rope_parameters.full_attention", kinds.get("full_attention", {}), 1_000_000.0)
        local_theta = local["rope_theta"]
    else:
        rope = _rope(fields, 1_000_000.0)
    return {
        **rope,
        "local_rope_theta": local_theta,
        "activation": "gelu_tanh",
        "centered_norms": True,
        "post_norms": True,
        "scaled_embedding": True,
        "query_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _rope(fields: Fields, default_theta: float = 10_000.0) -> dict[str, Any]:
    """Base and scaling of the rotary frequencies, by their names in `DecoderConfig`.

    Newer configs say it in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`; "type" is how the oldest
    spell "rope_type".
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    return _rope_values(fields, name, fields.get(name, {}), default_theta)


def _rope_values(fields: Fields, name: str, values: Any, default_theta: float) -> dict[str, Any]:
    """As `_rope`, of one set of values, which a message calls by this name."""
    if not isinstance(values, Mapping) or any(isinstance(value, Mapping) for value in values.values()):
        raise fields.unsupported(name, values, "one set of values for all layers")
    rope = Fields(values, f"{CONFIG}{name}.")
    fields.require("partial_rotary_factor", 1.0, default=1.0)
    rope.require("partial_rotary_factor", 1.0, default=1.0)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind == "linear":
        return {"rope_theta": theta, "rope_scaling": LinearScaling(rope.number("factor"))}
    if kind != "llama3":
        raise rope.unsupported("rope_type", kind, one_of(("default", "linear", "llama3")))
    longest = fields.get("original_max_position_embeddings", fields.get("max_position_embeddings"))
    scaling = Llama3Scaling(
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.count("original_max_position_embeddings", longest, at_most=MAX_POSITIONS),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise CheckpointError(f"config.json: {name}.high_freq_factor must be more than low_freq_factor")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, or None."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        _check_layer_types(fields, family, num_layers)
    if family.windows == "no" or (family.windows == "some" and not fields.flag("use_sliding_window")):
        if kinds is not None and "sliding_attention" in kinds:
            raise fields.unsupported(
                "layer_types", "sliding_attention", '"full_attention", which is all that this model has'
            )
        return (None,) * num_layers
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        if family.is_gemma:  # a layer that is called sliding turns by another base, and would see all tokens
            raise fields.unsupported("sliding_window", None, "a number of tokens")
        return (None,) * num_layers
    window = fields.count("sliding_window", 4096, at_most=MAX_POSITIONS)
    if family.windows == "all":
        return (window,) * num_layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family.windows == "most":
        pattern = fields.count("sliding_window_pattern", 6)
        return tuple(window if layer % pattern else None for layer in range(1, num_layers + 1))
    first = fields.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json: max_window_layers must be a whole number; it is {first!r}")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _check_layer_types(fields: Fields, family: Family, num_layers: int) -> None:
    """Raise unless `layer_types` names a kind of attention that is computed here for each layer."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must name one kind for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.unsupported("layer_types", kind, one_of(("full_attention", "sliding_attention")))
    if family.windows == "all" and len(set(kinds)) > 1:
        raise fields.unsupported("layer_types", kinds, "one kind for all layers in this family")


def _end_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The tokens that end a text: one, several, or none."""
    value = (generation or {}).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
        raise CheckpointError(f"eos_token_id must be a token id, or a list of them; it is {value!r}")
    return tuple(dict.fromkeys(ids))


# What a folder holds


def load_folder(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    settle: Settle | None = None,
) -> Decoder:
    """Load a model from a Hugging Face folder, ready for inference.

    Names, shapes and dtypes of all tensors are checked against config.json before the first is read, and each is
    converted as it is read: at no time are there two copies of the weights.

    Args:
        folder: has config.json, and model.safetensors or its shards with model.safetensors.index.json.
        dtype: what to hold the weights in; None: what config.json says, or if it says nothing, what they are stored in.
        device: where to hold them.
        settle: as for `minicache.model.assembling.assemble`.

    Returns:
        The model in evaluation mode.

    Raises:
        UnsupportedModelError: it asks for what is not computed here.
        CheckpointError: a file is missing or unreadable, or the tensors are not those of config.json.
    """
    folder = Path(folder)
    values = _read_json(folder / "config.json")
    config = _config_of(folder, values)
    with without_memory():
        model = Decoder(config)
    stored = _stored_tensors(folder, tied=config.tie_word_embeddings)
    names = {_stored_name(name): name for name, _ in model.named_parameters()}
    wanted = {_stored_name(name): parameter.shape for name, parameter in model.named_parameters()}
    check_tensors(folder, {name: tensor.shape for name, tensor in stored.items()}, wanted, "config.json")
    _check_dtypes(stored)
    dtype = dtype or _dtype(folder, values) or _STORED[stored[_stored_name("embed_tokens.weight")].dtype]
    tensors = ((names[name], tensor) for name, tensor in _read_tensors(stored, names, dtype, device))
    return assemble(model, tensors, settle)


def folder_config(folder: Path) -> DecoderConfig:
    """The shape of a folder's model.

    Raises:
        UnsupportedModelError, CheckpointError: as `load_folder`.
    """
    return _config_of(folder, _read_json(folder / "config.json"))


def folder_dtype(folder: Path) -> torch.dtype:
    """What `load_folder` holds the weights in if no dtype is given: what config.json says, or else what is stored.

    Raises:
        UnsupportedModelError, CheckpointError: as `load_folder`.
    """
    values = _read_json(folder / "config.json")
    if (dtype := _dtype(folder, values)) is not None:
        return dtype
    stored = _stored_tensors(folder, tied=False)
    embedding = stored.get(_stored_name("embed_tokens.weight"))
    return torch.float32 if embedding is None else _STORED.get(embedding.dtype, torch.float32)


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """The tokens with which a folder's model ends its text.

    Raises:
        CheckpointError: config.json or generation_config.json cannot be read.
    """
    return _end_token_ids(_read_json(folder / "config.json"), _generation(folder))


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _config_of(folder: Path, values: Mapping[str, Any]) -> DecoderConfig:
    """The model's shape; where something is wrong with it, the error names the folder."""
    try:
        return decoder_config(values, _generation(folder))
    except CheckpointError as error:
        raise type(error)(f"{folder}: {error}") from error


def _generation(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else None


def _read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}: {_instead_of(path.parent)}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values


def _instead_of(folder: Path) -> str:
    """What to do where a folder is not that of a model."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return f"it has a GGUF file, so give that, {files[0]}"
    if files:
        return f"it has {len(files)} GGUF files, so give one of them, {files[0]} for instance"
    return "is it the folder of a model?"


def _dtype(folder: Path, values: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config gives; older ones call it torch_dtype."""
    name = values.get("dtype") or values.get("torch_dtype")
    if name is None:
        return None
    if name not in DTYPES:
        instead = f"{one_of(DTYPES)}; or say which, LLM(…, dtype=torch.float32)"
        raise Fields(values, f"{folder}: {CONFIG}").unsupported("dtype", name, instead)
    return DTYPES[name]


def _stored_name(name: str) -> str:
    """What a parameter of `Decoder` is called in a folder."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, Mapping) or not shards:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        files = []
        for name in sorted(set(map(str, shards.values()))):
            if Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX} names a file outside its folder: {name!r}")
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} lacks {name}, which {INDEX} names: was it downloaded to its end?")
            files.append(folder / name)
        return files
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickles:
        raise UnsupportedModelError(
            f"{folder} has its weights as a pickle, {pickles[0]}, and loading one can run code: save them as "
            "safetensors (`save_pretrained` of transformers does)"
        )
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")


def _stored_tensors(folder: Path, *, tied: bool) -> dict[str, _Stored]:
    """The tensors that a folder's files have, but for those that older `transformers` wrote without need."""
    stored: dict[str, _Stored] = {}
    for path in _weight_files(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in stored:
                    raise CheckpointError(f"{path} and {stored[name].file.name} both have {name}")
                if name.endswith(".rotary_emb.inv_freq"):  # follows from the config
                    continue
                rows = file.get_slice(name)
                stored[name] = _Stored(path, tuple(rows.get_shape()), rows.get_dtype())
    if tied and {"lm_head.weight", "model.embed_tokens.weight"} <= stored.keys():
        _check_tied(stored)
        del stored["lm_head.weight"]
    return stored


def _check_tied(stored: dict[str, _Stored]) -> None:
    """Raise unless a tied model's two copies of the embedding are equal."""
    head, embedding = (_open(stored[name].file) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    with head, embedding:
        if not torch.equal(head.get_tensor("lm_head.weight"), embedding.get_tensor("model.embed_tokens.weight")):
            raise UnsupportedModelError(
                f"{stored['lm_head.weight'].file}: lm_head.weight differs from model.embed_tokens.weight, and "
                "config.json says that they are tied: set tie_word_embeddings to false"
            )


def _check_dtypes(stored: dict[str, _Stored]) -> None:
    """Raise unless all tensors are stored as numbers that are read."""
    for name, (file, _, dtype) in stored.items():
        if dtype not in _STORED:
            raise UnsupportedModelError(
                f"{file}: {name} is stored as {dtype}, which is not supported; supported: {one_of(_STORED)}"
            )


def _read_tensors(
    stored: dict[str, _Stored], names: Iterable[str], dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, one after the other, converted."""
    for name in names:
        # An open file's pages stay in memory once they were read: opened for each tensor, it is one tensor's at most.
        with _open(stored[name].file) as file:
            # A copy, so nothing lies in a file that someone may delete or write to.
            yield name, file.get_tensor(name).to(device=device, dtype=dtype, copy=True)


def _open(path: Path) -> Any:
    """A safetensors file."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file, was it downloaded to its end? {error}"
        ) from error
