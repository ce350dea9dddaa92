"""A transformer's forward pass as an engine's steps need it on a CPU: few large products, and compiled kernels between.

The modules of `minicache.model.minigpt` and `minicache.model.decoder` say what is computed, one operation after the
other. That is dozens of operations a layer, and most of a decode step is spent between the products. Here
a layer is four products and five kernels (`minicache.kernels.cpu`): the weights of queries, keys and values are one
matrix, and so are those of gate and up; keys and values go straight into the blocks; and of the last layer only the
rows whose logits are read are computed beyond keys and values.

The result is that of the modules but for rounding; they are the fallback, and the oracle of the tests. No phase builds
this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minicache.cache.packed import StepTensors
from minicache.cache.paged import PagedStorage
from minicache.cache.quantized import scales_of
from minicache.kernels import AttentionMetadata
from minicache.kernels.cpu import rows as kernels
from minicache.kernels.cpu.steps import CacheArrays, check_slots, plan_step
from minicache.kernels.cpu.warming import require_ready
from minicache.model.decoder import Decoder
from minicache.model.minigpt import MiniGPT, Transformer

Array = NDArray[np.float32]

MLP_ROWS = 512
"""How many rows go through a feed-forward block at a time: so what is between its products stays in the CPU's cache."""

HEAD_NBYTES = 64 * 2**20
"""The largest embedding of which a copy is laid out for the product with the output rows. Above it, the product waits
for memory whatever the layout, and the copy would cost as much again."""


def fuse(model: object, *, in_place: bool = False) -> MiniGPT | Decoder | None:
    """Join a model's weights for the CPU, so `logits_at` can run it.

    Each joined matrix is laid out column by column: a CPU multiplies few rows by such a matrix faster
    (`benchmarks/engine.py`).

    Args:
        model: anything.
        in_place: the model's parameters become views of the joined matrices, so no weight is held twice. The model
            computes what it did; but `safetensors` refuses to save parameters that lie in one memory. If not in place,
            the model is left as it is, and the matrices are copies. A model that was joined in place stays so.

    Returns:
        The model, which `logits_at` can run now. None, and nothing was changed: it is no float32 `MiniGPT` or
        `Decoder` on the CPU, the kernels do not take its sizes, or it computes something else than its class: a module
        in it was replaced, or has a hook.
    """
    if not isinstance(model, MiniGPT | Decoder) or not _can_fuse(model):
        return None
    weights = _WEIGHTS.get(model)
    if weights is None or not weights.are_those_of(model):
        _join(model, in_place or (weights is not None and weights.in_place))
    return model


def _join(model: Transformer, in_place: bool) -> _Weights:
    # Not as inference tensors, whatever the caller's mode: the parameters that become views may be trained later.
    with torch.inference_mode(False), torch.no_grad():
        weights = _WEIGHTS[model] = _Weights.of(model, in_place)
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
    with torch.device("meta"):
        untouched = type(model)(model.config)
    return _parts(model) == _parts(untouched)


def _detours(model: nn.Module) -> Iterator[object]:
    """Of each module its hooks, and whether its `forward` was replaced: what is true here, the kernels would skip."""
    for module in model.modules():
        yield module._forward_pre_hooks
        yield module._forward_hooks
        yield "forward" in vars(module)


def _parts(model: nn.Module) -> list[tuple[str, object]]:
    """What a model is made of: the types of its modules, and the shapes of its parameters."""
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return [*modules, *((name, parameter.shape) for name, parameter in model.named_parameters())]


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
    logits = _empty(len(hidden), head.matrix.shape[1])
    _product(hidden, head, logits)
    return logits


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
        weights = _join(model, weights.in_place)
    num_new, num_seqs, num_rows = step.token_ids.shape[0], step.context_lens.shape[0], step.last.shape[0]
    config = weights.config
    eps, scale = np.float32(config.norm_eps), config.head_dim**-0.5
    cos, sin = (_array(table) for table in model.rotation(step.positions))
    num_blocks, block_size = caches[0].blocks.k.shape[:2]
    slots = check_slots(step.slot_mapping, num_blocks * block_size)
    decode = AttentionMetadata(step.block_tables, step.context_lens)  # of the last token of each sequence
    prompts = AttentionMetadata(step.block_tables, step.context_lens, step.query_start_loc)
    plan = plan_step(decode if num_new == num_seqs else prompts, num_blocks, block_size)
    residual, room = _array(model.embed_tokens(step.token_ids)), _Room(config, num_new)
    kernels.rms_norm(residual, weights.norms[0], eps, room.y_array)
    for layer, next_norm, cache in zip(weights.layers, weights.norms[1:], caches, strict=True):
        _product(room.y, layer.qkv, room.qkv)
        queries = room.heads_array
        if layer.q_norm is not None:
            kernels.norm_heads(queries, layer.q_norm, layer.k_norm, eps, config.num_heads)
        kernels.rope_store(queries, cos, sin, slots, *cache.slots, config.num_heads)
        if layer is weights.layers[-1] and num_rows < num_new:
            # Beyond keys and values, the last layer is computed for the rows that are read, and for no others.
            read = decode if num_rows == num_seqs else _read_rows(step)
            plan, last = plan_step(read, num_blocks, block_size), step.last.numpy()
            queries, residual, room = queries[last], residual[last], _Room(config, num_rows)
        plan.attend(queries, cache.blocks, scale, layer.window, room.out_array)
        _product(room.out, layer.output, room.y)
        if all_reduce is not None:
            all_reduce(room.y)
        kernels.add_rms_norm(residual, room.y_array, layer.norm, eps, room.y_array)
        _feed_forward(layer, room)
        if all_reduce is not None:
            all_reduce(room.y)
        kernels.add_rms_norm(residual, room.y_array, next_norm, eps, room.y_array)
    return room.y


def _read_rows(step: StepTensors) -> AttentionMetadata:
    """Each token of `step.last` as a sequence of its own, which ends with it."""
    ends = step.query_start_loc[1:]
    owner = torch.searchsorted(ends, step.last, right=True)
    context_lens = step.context_lens[owner] - (ends[owner] - 1 - step.last)
    return AttentionMetadata(step.block_tables[owner], context_lens)


class LayerCache(NamedTuple):
    """The keys and values of one layer, as kernels see them; both are the same memory.

    Attributes:
        blocks: block by block.
        slots: slot by slot.
    """

    blocks: CacheArrays
    slots: CacheArrays


def layer_caches(storage: PagedStorage) -> list[LayerCache]:
    """What `logits_at` writes to and reads, layer by layer: the memory of a storage on the CPU, float32 or quantized.

    The kernels for it are compiled or loaded, unless they are ready.
    """
    require_ready(storage.dtype)
    return [
        LayerCache(
            *(
                CacheArrays.of(storage.k(layer), storage.v(layer), **scales_of(storage, layer), by_slot=by_slot)
                for by_slot in (False, True)
            )
        )
        for layer in range(storage.num_layers)
    ]


class _Room:
    """Memory for what a layer computes of some rows, the same for all layers; and the same memory as kernels see it.

    Args:
        config: of the model.
        num_rows: N.

    Attributes:
        y: `[N, hidden_size]`, what was normed, or what is added next to the residual stream.
        qkv: `[N, (H + 2 · H_kv) · d]`.
        out: `[N, H · d]`, what attention gives.
        parts: of at most MLP_ROWS rows of `y` each: these rows, and room for their gate and up and for the product of
            both.
        y_array, heads_array, out_array: `y`; `qkv` and `out` head by head, `[N, heads, d]`.
    """

    def __init__(self, config: Any, num_rows: int) -> None:
        head_dim, num_heads = config.head_dim, config.num_heads
        self.y = _empty(num_rows, config.hidden_size)
        self.qkv = _empty(num_rows, (num_heads + 2 * config.num_kv_heads) * head_dim)
        self.out = _empty(num_rows, num_heads * head_dim)
        self.y_array = self.y.numpy()
        self.heads_array = self.qkv.numpy().reshape(num_rows, -1, head_dim)
        self.out_array = self.out.numpy().reshape(num_rows, -1, head_dim)
        size = min(num_rows, MLP_ROWS)
        gate_up = _empty(size, 2 * config.intermediate_size)
        hidden = _empty(size, config.intermediate_size)
        self.parts = []
        for rows in torch.split(self.y, size):
            its_gate_up, its_hidden = gate_up[: len(rows)], hidden[: len(rows)]
            self.parts.append((rows, its_gate_up, its_hidden, its_gate_up.numpy(), its_hidden.numpy()))


@dataclass(frozen=True)
class _Joined:
    """Linear layers with the same input, as one.

    Attributes:
        matrix: `[in, Σ out]`, contiguous.
        bias: `[Σ out]`; None: none of them has one.
    """

    matrix: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear, in_place: bool) -> _Joined:
        """Join layers; in place, their weights and biases become views of the joined ones."""
        sizes = [layer.out_features for layer in layers]
        matrix = torch.cat([layer.weight.detach().t() for layer in layers], dim=1)
        has_bias = layers[0].bias is not None
        bias = torch.cat([layer.bias.detach() for layer in layers]) if has_bias else None
        if in_place:
            for layer, columns in zip(layers, torch.split(matrix, sizes, dim=1), strict=True):
                layer.weight.data = columns.t()
            if bias is not None:
                for layer, numbers in zip(layers, torch.split(bias, sizes), strict=True):
                    layer.bias.data = numbers
        return cls(matrix, bias)


@dataclass(frozen=True)
class _Layer:
    """The weights of one block."""

    qkv: _Joined
    output: _Joined
    gate_up: _Joined
    down: _Joined
    norm: Array
    q_norm: Array | None
    k_norm: Array | None
    window: int

    @classmethod
    def of(cls, block: Any, in_place: bool) -> _Layer:
        """Join the weights of a `minicache.model.minigpt.Block`."""
        q_norm, k_norm = (_gain(getattr(block.self_attn, name, None)) for name in ("q_norm", "k_norm"))
        qkv, output, gate_up, down = (_Joined.of(*layers, in_place=in_place) for layers in _linear_layers(block))
        window = getattr(block.self_attn, "window", None)
        return cls(qkv, output, gate_up, down, _gain(block.post_attention_layernorm), q_norm, k_norm, window or 0)


def _gain(norm: nn.Module | None) -> Any:
    """The gain of a norm, as kernels take it: an array `[width]`; None if there is no norm."""
    weight = getattr(norm, "weight", None)
    return None if weight is None else _array(weight.contiguous())


def _linear_layers(block: Any) -> tuple[tuple[nn.Linear, ...], ...]:
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
        in_place: whether the model's parameters are views of these.
        parameters: the model's.
        counted: those of which PyTorch counts how often they are changed in place: all but inference tensors.
        versions: `_versions` when the weights were joined.
        samples: some numbers of each parameter that was copied: views. Not every optimizer has PyTorch count its steps.
        numbers: what was in the samples when the weights were joined.
    """

    config: Any
    layers: list[_Layer]
    norms: list[Array]
    head: _Joined
    in_place: bool
    parameters: list[nn.Parameter]
    counted: list[nn.Parameter]
    versions: list[int]
    samples: list[Array]
    numbers: bytes

    @classmethod
    def of(cls, model: Any, in_place: bool) -> _Weights:
        """Join a model's weights."""
        layers, head = [_Layer.of(block, in_place) for block in model.layers], _output_matrix(model, in_place)
        norms = [*(block.input_layernorm for block in model.layers), model.norm]
        parameters = list(model.parameters())
        gains = [_gain(norm) for norm in norms]
        copied = [model.embed_tokens.weight] if in_place else parameters
        samples = [_sample(parameter) for parameter in copied]
        numbers = np.concatenate(samples).tobytes()
        counted = [parameter for parameter in parameters if not parameter.is_inference()]
        versions = _versions(parameters, counted)
        return cls(model.config, layers, gains, head, in_place, parameters, counted, versions, samples, numbers)

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


def _output_matrix(model: Any, in_place: bool) -> _Joined:
    """The output layer. Where it is the embedding, a copy laid out for the product, unless that is large."""
    layer = getattr(model, "lm_head", None)
    if layer is not None:
        return _Joined.of(layer, in_place=in_place)
    matrix = model.embed_tokens.weight.detach().t()
    return _Joined(matrix.contiguous() if matrix.nbytes <= HEAD_NBYTES else matrix, None)


def _product(rows: Tensor, weights: _Joined, out: Tensor) -> None:
    """Multiply rows by joined weights."""
    if weights.bias is None:
        torch.mm(rows, weights.matrix, out=out)
    else:
        torch.addmm(weights.bias, rows, weights.matrix, out=out)


def _feed_forward(layer: _Layer, room: _Room) -> None:
    """SwiGLU of the rows of `room.y`, in place."""
    for rows, gate_up, hidden, gate_up_array, hidden_array in room.parts:
        _product(rows, layer.gate_up, gate_up)
        kernels.silu_mul(gate_up_array, hidden_array)
        _product(hidden, layer.down, rows)


def _empty(*shape: int) -> Tensor:
    """Memory for results: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _array(tensor: Tensor) -> Array:
    """The tensor's memory as numpy sees it."""
    array: Array = tensor.detach().numpy()
    return array
