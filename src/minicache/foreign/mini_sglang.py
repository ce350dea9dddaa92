"""Mini-SGLang's scheduler and radix cache (https://github.com/sgl-project/mini-sglang), from a checkout.

It is driven as its loop without overlap does: the results of a step are processed before the next is scheduled. Known
are the commits from February 2026 on, which put unfinished requests into the radix cache too. It needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from minicache.foreign.adapter import Adapter, RequestState, State, Work
from minicache.foreign.checkout import load
from minicache.foreign.workload import Limits


class MiniSglang(Adapter):
    """`minisgl.scheduler.scheduler.Scheduler`, with its managers, and an engine that only counts."""

    name = "mini-sglang"
    marker = "python/minisgl/scheduler/scheduler.py"
    block_sizes = (1, 2, 3)
    can_abort = True

    def __init__(self, checkout: Path) -> None:
        self._torch, self._tensor = _torch_without_pinned_memory()
        self._messages = _messages()
        self._core, self._scheduling = load(
            checkout / "python",
            ("minisgl.core", "minisgl.scheduler.scheduler"),
            bare=("minisgl", "minisgl.scheduler"),
            instead={
                "torch": self._torch,
                "minisgl.utils": _utilities(),
                "minisgl.message": self._messages,
                "minisgl.scheduler.io": _module("io", SchedulerIOMixin=object),
                "minisgl.kernel": _module("kernel", fast_compare_key=_common_length),
                "minisgl.scheduler.config": None,
                "minisgl.env": None,
            },
        )

    def start(self, limits: Limits) -> None:
        """As `Adapter.start`."""
        scheduling, size = self._scheduling, limits.block_size
        vars(self._core)["_GLOBAL_CTX"] = None
        self._core.set_global_ctx(self._core.Context(page_size=size))
        width = -(-limits.max_model_len // size) * size
        page_table = self._torch.zeros((limits.max_num_seqs + 1, width), dtype=self._torch.int32)
        self._scheduler = scheduler = scheduling.Scheduler.__new__(scheduling.Scheduler)
        scheduler.engine = MagicMock(page_table=page_table, max_seq_len=limits.max_model_len)
        scheduler.engine.graph_runner.pad_batch = lambda batch: setattr(batch, "padded_reqs", batch.reqs)
        scheduler.engine.forward_batch = self._forward
        scheduler.device = page_table.device
        scheduler.table_manager = scheduling.TableManager(limits.max_num_seqs, page_table)
        scheduler.cache_manager = scheduling.CacheManager(limits.num_blocks, size, page_table, "radix")
        scheduler.decode_manager = scheduling.DecodeManager(size)
        scheduler.prefill_manager = scheduling.PrefillManager(
            scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
        )
        scheduler.finished_reqs = set()
        scheduler.eos_token_id = -1
        scheduler.token_pool = scheduler.table_manager.token_pool
        scheduler.prefill_budget = limits.max_num_batched_tokens
        scheduler.send_result = self._replies = MagicMock()
        self._size, self._step, self._outputs = size, None, dict[int, list[int]]()

    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int) -> None:
        """As `Adapter.add`."""
        parameters = self._core.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        message = self._messages.UserMsg(uid=request_id, input_ids=self._tensor(prompt), sampling_params=parameters)
        self._scheduler._process_one_msg(message)
        self._outputs[request_id] = []

    def schedule(self) -> list[Work]:
        """As `Adapter.schedule`."""
        self._step = self._scheduler._schedule_next_batch()
        return [Work(each.uid, each.cached_len, each.extend_len) for each in self._batch]

    def commit(self, token_ids: Sequence[int]) -> dict[int, list[int]]:
        """As `Adapter.commit`."""
        step, self._next = self._step, self._tensor(token_ids)
        if step is None:
            return {}
        output = self._scheduler._forward(step)
        self._step = None
        self._scheduler._process_last_data((step, output))
        finished = {}
        for reply in self._replies.call_args.args[0]:
            self._outputs[reply.uid].append(reply.next_token)
            if reply.finished:
                finished[reply.uid] = self._outputs[reply.uid]
        return finished

    def abort(self, request_id: int) -> None:
        """As `Adapter.abort`."""
        self._scheduler._process_one_msg(self._messages.AbortBackendMsg(uid=request_id))

    def state(self) -> State:
        """As `Adapter.state`."""
        cache, waiting = self._scheduler.cache_manager, self._scheduler.prefill_manager.pending_list
        chunked = {each.uid: each.chunked_req for each in waiting if each.chunked_req is not None}
        running = {*self._scheduler.decode_manager.running_reqs, *self._batch} - {*chunked.values()}
        requests = [RequestState(each.uid, each.input_ids.tolist(), self._blocks(each), True) for each in running]
        for each in waiting:
            blocks = self._blocks(chunked[each.uid]) if each.uid in chunked else ()
            requests.append(RequestState(each.uid, each.input_ids.tolist(), blocks, False))
        return State(requests, self._pages(cache.free_slots), self._cached(cache.prefix_cache.root_node))

    @property
    def _batch(self) -> list[Any]:
        """The requests of the step that was scheduled and is not committed."""
        return [] if self._step is None else list(self._step.batch.reqs)

    def _forward(self, batch: Any, _: object) -> Any:
        """What the forward pass does to the requests, and the tokens."""
        for each in batch.reqs:
            each.complete_one()
        return _ForwardOutput((self._next, self._next, MagicMock()))

    def _blocks(self, request: Any) -> tuple[int, ...]:
        """A request's block table: as many pages as its tokens in the cache need, those of the step included."""
        length = request.device_len if request in self._batch else request.cached_len
        return self._pages(self._scheduler.cache_manager.page_table[request.table_idx, : length : self._size])

    def _pages(self, slots: Any) -> tuple[int, ...]:
        return tuple(slot // self._size for slot in slots.tolist())

    def _cached(self, root: Any) -> list[int]:
        """The pages of a radix tree."""
        nodes, pages = list(root.children.values()), list[int]()
        while nodes:
            node = nodes.pop()
            pages += self._pages(node.value[:: self._size])
            nodes += node.children.values()
        return pages


class _ForwardOutput(tuple[Any, Any, Any]):
    """The engine's answer, of which the scheduler reads the first by name."""

    @property
    def next_tokens_gpu(self) -> Any:
        return self[0]


def _module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


def _messages() -> ModuleType:
    """The messages between its processes: plain values, by whatever name they have."""

    @cache
    def message(name: str) -> type[SimpleNamespace]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (SimpleNamespace,), {})

    return _module("message", __getattr__=message)


def _utilities() -> ModuleType:
    """The helpers that the scheduler takes from `minisgl.utils`, which imports tokenizers and sockets too."""
    return _module(
        "utils",
        align_down=lambda number, size: number // size * size,
        div_ceil=lambda number, size: -(-number // size),
        init_logger=MagicMock(),
        load_tokenizer=None,
        Registry=_Registry,
    )


class _Registry:
    """Constructors by name, as `minisgl.utils.Registry`."""

    def __init__(self, _: str) -> None:
        self._constructors: dict[str, Any] = {}

    def __class_getitem__(cls, _: object) -> type[_Registry]:
        return cls

    def __getitem__(self, name: str) -> Any:
        return self._constructors[name]

    def register(self, name: str) -> Callable[[Any], Any]:
        return lambda constructor: self._constructors.setdefault(name, constructor)


def _common_length(first: Any, second: Any) -> int:
    """How many elements two tensors have in common at their beginning."""
    pairs = zip(first.tolist(), second.tolist(), strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _torch_without_pinned_memory() -> tuple[Any, Callable[[Sequence[int]], Any]]:
    """torch, and a way to make tensors, of which `pin_memory` does nothing: it needs a GPU."""
    import torch

    class Tensor(torch.Tensor):
        def pin_memory(self, *_: object) -> Tensor:
            return self

    class Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
            return torch.empty(*size, **options)

        @staticmethod
        def tensor(*data: Any, pin_memory: bool = False, **options: Any) -> Any:
            return torch.tensor(*data, **options)

    def tensor(values: Sequence[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32).as_subclass(Tensor)

    return Torch("torch"), tensor
