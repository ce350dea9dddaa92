"""A transformer's forward pass as an engine's steps need it on a CPU: few large products, and compiled kernels between.

The modules of `minicache.model.minigpt` and `minicache.model.decoder` say what is computed, one operation after the
other. That is dozens of operations a layer, and most of a decode step is spent between the products. Here
a layer is four products and five kernels (`minicache.kernels.cpu`): the weights of queries, keys and values are one
matrix, and so are those of gate and up, in the order in which a product reads them; keys and values go straight into
the blocks; and of the last layer only the rows whose logits are read are computed beyond keys and values.

The result is that of the modules but for rounding; they are the fallback, and the oracle of the tests. No phase builds
this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minicache.cache.packed import Places, StepTensors
from minicache.cache.paged import PagedStorage
from minicache.cache.quantized import scales_of
from minicache.kernels.cpu import rows as kernels
from minicache.kernels.cpu.steps import CacheArrays, check_slots, make_plan
from minicache.kernels.cpu.warming import require_ready
from minicache.model.assembling import without_memory
from minicache.model.decoder import Decoder, GeluFeedForward, PostNormBlock
from minicache.model.linear import PackedEmbedding, PackedLinear
from minicache.model.minigpt import MiniGPT, Transformer
from minicache.model.panels import Panels

Array = NDArray[np.float32]
Integers = NDArray[np.int64]

MLP_ROWS = 512
"""How many rows go through a feed-forward block at a time: so what is between its products stays in the CPU's cache."""


def fuse(model: object) -> MiniGPT | Decoder | None:
    """Join a model's weights for the CPU, so `logits_at` can run it.

    Those of packed layers (`minicache.model.linear`) are joined already. Of `nn.Linear` layers the joined weights are
    copies, and the model is left as it is.

    Args:
        model: anything.

    Returns:
        The model, which `logits_at` can run now. None, and nothing was changed: it is no float32 `MiniGPT` or
        `Decoder` on the CPU, the kernels do not take its sizes, or it computes something else than its class: a module
        in it was replaced, or has a hook.
    """
    if not isinstance(model, MiniGPT | Decoder) or not _can_fuse(model):
        return None
    weights = _WEIGHTS.get(model)
    if weights is None or not weights.are_those_of(model):
        _join(model)
    return model


def _join(model: Transformer) -> _Weights:
    # Not as inference tensors, whatever the caller's mode.
    with torch.inference_mode(False), torch.no_grad():
        weights = _WEIGHTS[model] = _Weights.of(model)
    return weights


def _can_fuse(model: Any) -> bool:
    if type(model) not in (MiniGPT, Decoder):  # a subclass may compute something else
        return False
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in model.parameters()):
        return False
    if model.config.head_dim % 8 or model.config.intermediate_size < 8:
        return False
    if any(_detours(model)):
        return False
    with without_memory():
        untouched = type(model)(model.config)
    return _parts(model) == _parts(untouched)


def _detours(model: nn.Module) -> Iterator[object]:
    """Of each module its hooks, and whether its `forward` was replaced: what is true here, the kernels would skip."""
    for module in model.modules():
        yield module._forward_pre_hooks
        yield module._forward_hooks
        yield "forward" in vars(module)


def _parts(model: nn.Module) -> set[tuple[str, object]]:
    """What a model is made of: the types of its modules, and the shapes of its parameters, be they packed or not."""
    parts: set[tuple[str, object]] = {(name, parameter.shape) for name, parameter in model.named_parameters()}
    embedding = model.embed_tokens
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            if name == "lm_head" and isinstance(embedding, PackedEmbedding):
                continue  # the embedding's own numbers
            parts.add((f"{name}.weight", torch.Size(module.weights.shape)))
            if isinstance(module, PackedLinear) and module.bias is not None:
                parts.add((f"{name}.bias", module.bias.shape))
        parts.add((name, _PLAIN.get(type(module), type(module))))
    return parts


_PLAIN = {PackedLinear: nn.Linear, PackedEmbedding: nn.Embedding}


def logits_at(model: Transformer, caches: Sequence[LayerCache], step: StepTensors) -> Tensor:
    """Run a model over a step's tokens, and return the logits after some of them (`StepTensors.last`).

    Args:
        model: as for `hidden_at`.
        caches: likewise.
        step: likewise.

    Returns:
        `[R, vocab_size]`.

    Raises:
        Exception: as `hidden_at`.
    """
    return logits_of(model, hidden_at(model, caches, step))


def logits_of(model: Transformer, hidden: Tensor) -> Tensor:
    """The logits `[R, vocab_size]` of what `hidden_at` gives."""
    head = _WEIGHTS[model].head
    logits = np.empty((len(hidden), head.panels.shape[0]), np.float32)
    _product(hidden.numpy(), head, logits)
    return torch.from_numpy(logits)


def hidden_at(
    model: Transformer,
    caches: Sequence[LayerCache],
    step: StepTensors,
    all_reduce: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Run a model over a step's tokens, and return what the last norm gives of some of them (`StepTensors.last`).

    Args:
        model: after `fuse`. If its weights were changed in place since, by training for instance, they are joined anew.
            A hook that was registered since is not called, and a module that was put into it since is not run.
        caches: of each layer (`layer_caches`); their blocks receive the tokens' keys and values.
        step: on the CPU, without padding.
        all_reduce: of a model that is a shard of one on several processes, twice a layer called with what is added to
            the residual stream: makes it the sum over the shards (`minicache.parallel`). None: the model is whole.

    Returns:
        `[R, hidden_size]`.

    Raises:
        IndexError: a token or a position is not the model's, or a block or a slot is not the storage's.
        ValueError: a length is more than its table has room for, or less than its sequence's new tokens; or the model's
            weights have changed, and it cannot be fused any more.
    """
    weights = _WEIGHTS[model]
    if not weights.are_current:
        if not _can_fuse(model):
            raise ValueError("the model was converted, or parts of it were replaced: make a new engine for it")
        weights = _join(model)
    num_new, num_seqs, num_rows = step.token_ids.shape[0], step.context_lens.shape[0], step.last.shape[0]
    config = weights.config
    eps, scale = np.float32(config.norm_eps), config.head_dim**-0.5
    rotations = [(_array(cos), _array(sin)) for cos, sin in model.rotations(step.positions)]
    num_blocks, block_size = caches[0].blocks.k.shape[:2]
    tables, lens, starts = step.block_tables.numpy(), step.context_lens.numpy(), step.query_start_loc.numpy()
    slots = check_slots(step.slot_mapping, num_blocks * block_size)
    plans = [make_plan(each, lens, None if num_new == num_seqs else starts, num_blocks, block_size) for each in tables]
    residual, room = _array(model.embed(step.token_ids)), _Room(config, num_new)
    kernels.rms_norm(residual, weights.norms[0], eps, room.y)
    for layer, next_norm, cache in zip(weights.layers, weights.norms[1:], caches, strict=True):
        _product(room.y, layer.qkv, room.qkv)
        queries = room.heads
        if layer.q_norm is not None:
            kernels.norm_heads(queries, layer.q_norm, layer.k_norm, eps, config.num_heads)
        kernels.rope_store(queries, *rotations[layer.rotation], slots[cache.group], *cache.slots, config.num_heads)
        plan = plans[cache.group]
        if layer is weights.layers[-1] and num_rows < num_new:
            # Beyond keys and values, the last layer is computed for the rows that are read, and for no others.
            last = step.last.numpy()
            plan = make_plan(*_read_rows(tables[cache.group], lens, starts, last), None, num_blocks, block_size)
            queries, residual, room = queries[last], residual[last], _Room(config, num_rows)
        plan.attend(queries, cache.blocks, scale, layer.window, room.out_heads)
        _product(room.out, layer.output, room.y)
        if all_reduce is not None:
            all_reduce(torch.from_numpy(room.y))
        if layer.post_norms is not None:
            kernels.rms_norm(room.y, layer.post_norms[0], eps, room.y)
        kernels.add_rms_norm(residual, room.y, layer.norm, eps, room.y)
        _feed_forward(layer, room)
        if all_reduce is not None:
            all_reduce(torch.from_numpy(room.y))
        if layer.post_norms is not None:
            kernels.rms_norm(room.y, layer.post_norms[1], eps, room.y)
        kernels.add_rms_norm(residual, room.y, next_norm, eps, room.y)
    return torch.from_numpy(room.y)


def _read_rows(tables: Integers, lens: Integers, starts: Integers, last: Integers) -> tuple[Integers, Integers]:
    """Each token of `StepTensors.last` as a sequence of its own, which ends with it: their block tables and lengths."""
    if last.size == lens.size:  # the last token of each sequence
        return tables, lens
    ends = starts[1:]
    owner = np.searchsorted(ends, last, side="right")
    return tables[owner], lens[owner] - (ends[owner] - 1 - last)


class LayerCache(NamedTuple):
    """The keys and values of one layer, as kernels see them; both are the same memory.

    Attributes:
        blocks: block by block.
        slots: slot by slot.
        group: whose slots and block tables are the layer's.
    """

    blocks: CacheArrays
    slots: CacheArrays
    group: int


def layer_caches(storage: PagedStorage, places: Places | None = None) -> list[LayerCache]:
    """What `logits_at` writes to and reads, layer by layer: the memory of a storage on the CPU, float32 or quantized.

    The kernels for it are compiled or loaded, unless they are ready.

    Args:
        storage: where keys and values are.
        places: of each layer. None: all are in one group.
    """
    require_ready(storage.dtype)
    caches = []
    for group, at in places or [(0, layer) for layer in range(storage.num_layers)]:
        k, v, scales = storage.k(at), storage.v(at), scales_of(storage, at)
        blocks, slots = (CacheArrays.of(k, v, **scales, by_slot=by_slot) for by_slot in (False, True))
        caches.append(LayerCache(blocks, slots, group))
    return caches


class _Room:
    """Memory for what a layer computes of some rows, the same for all layers.

    Args:
        config: of the model.
        num_rows: N.

    Attributes:
        y: `[N, hidden_size]`, what was normed, or what is added next to the residual stream.
        qkv: `[N, (H + 2 · H_kv) · d]`.
        out: `[N, H · d]`, what attention gives.
        heads, out_heads: `qkv` and `out` head by head, `[N, heads, d]`.
        parts: of at most MLP_ROWS rows of `y` each: these rows, and room for their gate and up and for the product of
            both.
    """

    def __init__(self, config: Any, num_rows: int) -> None:
        head_dim, num_heads = config.head_dim, config.num_heads
        self.y = np.empty((num_rows, config.hidden_size), np.float32)
        self.qkv = np.empty((num_rows, (num_heads + 2 * config.num_kv_heads) * head_dim), np.float32)
        self.out = np.empty((num_rows, num_heads * head_dim), np.float32)
        self.heads, self.out_heads = (each.reshape(num_rows, -1, head_dim) for each in (self.qkv, self.out))
        size = min(num_rows, MLP_ROWS)
        gate_up = np.empty((size, 2 * config.intermediate_size), np.float32)
        hidden = np.empty((size, config.intermediate_size), np.float32)
        self.parts = []
        for first in range(0, num_rows, size):
            rows = self.y[first : first + size]
            self.parts.append((rows, gate_up[: len(rows)], hidden[: len(rows)]))


@dataclass(frozen=True)
class _Joined:
    """Linear layers with the same inputs, as one.

    Attributes:
        panels: their weights.
        bias: `[Σ out]`; None: none of them has one.
    """

    panels: Panels
    bias: Array | None

    @classmethod
    def of(cls, *layers: nn.Linear | PackedLinear) -> _Joined:
        """Join layers: of `nn.Linear` copies, of packed ones what they share already."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        bias = _array(torch.cat(biases)) if biases else None
        packed = [cast(Panels, layer.weights).joined for layer in layers if isinstance(layer, PackedLinear)]
        if packed and packed[0] is not None:
            return cls(packed[0], bias)
        return cls(Panels.of(*(cast(nn.Linear, layer).weight for layer in layers)), bias)


@dataclass(frozen=True)
class _Layer:
    """The weights of one block.

    Attributes:
        qkv, output, gate_up, down: its linear layers.
        is_gelu: what gates the feed-forward block; else SiLU.
        norm: the gain of the norm before the feed-forward block.
        post_norms: of those behind attention and behind the feed-forward block; None: there are none.
        q_norm, k_norm: of those of queries and keys.
        window: W; 0: none.
        rotation: its kind of angles.
    """

    qkv: _Joined
    output: _Joined
    gate_up: _Joined
    down: _Joined
    is_gelu: bool
    norm: Array
    post_norms: tuple[Array, Array] | None
    q_norm: Array | None
    k_norm: Array | None
    window: int
    rotation: int

    @classmethod
    def of(cls, block: Any, rotation: int) -> _Layer:
        """Join the weights of a `minicache.model.minigpt.Block`, or a `minicache.model.decoder.PostNormBlock`."""
        q_norm, k_norm = (_gain(getattr(block.self_attn, name, None)) for name in ("q_norm", "k_norm"))
        qkv, output, gate_up, down = (_Joined.of(*layers) for layers in _linear_layers(block))
        is_gelu = isinstance(block.mlp, GeluFeedForward)
        norm, post_norms = block.post_attention_layernorm, None
        if isinstance(block, PostNormBlock):
            norm = block.pre_feedforward_layernorm
            post_norms = _gain(block.post_attention_layernorm), _gain(block.post_feedforward_layernorm)
        window = getattr(block.self_attn, "window", None) or 0
        return cls(qkv, output, gate_up, down, is_gelu, _gain(norm), post_norms, q_norm, k_norm, window, rotation)


def _gain(norm: nn.Module | None) -> Any:
    """The gain of a norm, as kernels take it: an array `[width]`; None if there is no norm."""
    gain = getattr(norm, "gain", getattr(norm, "weight", None))
    return None if gain is None else _array(gain.contiguous())


def _linear_layers(block: Any) -> tuple[tuple[nn.Linear | PackedLinear, ...], ...]:
    """The linear layers of a block, those with the same input together."""
    attention, mlp = block.self_attn, block.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


@dataclass(frozen=True)
class _Weights:
    """The joined weights of a model.

    Attributes:
        config: of the model.
        layers: of each block.
        norms: of each block the gain of its first norm, which is computed with the sum before it; last the model's own.
        head: the output layer.
        parameters: the model's.
        counted: those of which PyTorch counts how often they are changed in place: all but inference tensors.
        versions: `_versions` when the weights were joined.
        samples: some numbers of each parameter: views. Not every optimizer has PyTorch count its steps.
        numbers: what was in the samples when the weights were joined.
    """

    config: Any
    layers: list[_Layer]
    norms: list[Array]
    head: _Joined
    parameters: list[nn.Parameter]
    counted: list[nn.Parameter]
    versions: list[int]
    samples: list[Array]
    numbers: bytes

    @classmethod
    def of(cls, model: Any) -> _Weights:
        """Join a model's weights."""
        layers = [_Layer.of(*each) for each in zip(model.layers, model.rotation_kinds, strict=True)]
        head = _output_layer(model)
        norms = [*(block.input_layernorm for block in model.layers), model.norm]
        parameters = list(model.parameters())
        gains = [_gain(norm) for norm in norms]
        samples = [_sample(parameter) for parameter in parameters]
        numbers = np.concatenate(samples).tobytes()
        counted = [parameter for parameter in parameters if not parameter.is_inference()]
        versions = _versions(parameters, counted)
        return cls(model.config, layers, gains, head, parameters, counted, versions, samples, numbers)

    def are_those_of(self, model: Transformer) -> bool:
        """Whether the model has the same parameters still, and none has been changed since."""
        own = list(model.parameters())
        return len(own) == len(self.parameters) and all(map(operator.is_, own, self.parameters)) and self.are_current

    @property
    def are_current(self) -> bool:
        """Whether none of the parameters has been changed since, as far as PyTorch counts or a sample shows that."""
        versions = _versions(self.parameters, self.counted)
        return self.versions == versions and self.numbers == np.concatenate(self.samples).tobytes()


def _versions(parameters: Sequence[nn.Parameter], counted: Sequence[nn.Parameter]) -> list[int]:
    """Where each parameter is, and how often each of those that are counted has been changed in place."""
    return [*map(Tensor.data_ptr, parameters), *map(operator.attrgetter("_version"), counted)]


def _sample(parameter: nn.Parameter) -> Array:
    """At least four numbers of a parameter, or all: a view."""
    numbers = parameter.detach()
    numbers = numbers.diagonal() if numbers.ndim == 2 else numbers
    return _array(numbers[:: max(1, len(numbers) // 4)])


_WEIGHTS: WeakKeyDictionary[Transformer, _Weights] = WeakKeyDictionary()
"""Of every model that was fused. No attribute of the model: a copy of a model would copy it, and be stale."""


def _output_layer(model: Any) -> _Joined:
    """The output layer; where it is the embedding, that."""
    if model.lm_head is None:
        return _Joined(Panels.of(model.embed_tokens.weight), None)
    return _Joined.of(model.lm_head)


def _product(rows: Array, weights: _Joined, out: Array) -> None:
    """Multiply rows by joined weights."""
    weights.panels.times(rows, out)
    if weights.bias is not None:
        out += weights.bias


def _feed_forward(layer: _Layer, room: _Room) -> None:
    """The feed-forward block on the rows of `room.y`, in place."""
    for rows, gate_up, hidden in room.parts:
        _product(rows, layer.gate_up, gate_up)
        (kernels.gelu_mul if layer.is_gelu else kernels.silu_mul)(gate_up, hidden)
        _product(hidden, layer.down, rows)


def _array(tensor: Tensor) -> Array:
    """The tensor's memory as numpy sees it."""
    array: Array = tensor.detach().numpy()
    return array
