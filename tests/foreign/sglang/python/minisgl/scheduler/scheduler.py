from types import SimpleNamespace
from typing import Any

import torch
from minisgl.core import Req
from minisgl.message import AbortBackendMsg, DetokenizeMsg, UserMsg
from minisgl.utils import div_ceil


class TableManager:
    def __init__(self, max_running_reqs: int, page_table: torch.Tensor) -> None:
        self.rows = list(range(max_running_reqs))
        self.token_pool = torch.zeros_like(page_table)


class Node:
    """Of a tree of pages: the pages of one finished request, so it is a tree of depth one."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, ...], Node] = {}
        self.value = torch.empty(0, dtype=torch.int32)


class CacheManager:
    def __init__(self, num_pages: int, page_size: int, page_table: torch.Tensor, kind: str) -> None:
        self.page_size, self.page_table = page_size, page_table
        self.free_slots = torch.arange(num_pages, dtype=torch.int32) * page_size
        self.prefix_cache = SimpleNamespace(root_node=Node())

    def allocate(self, req: Req) -> bool:
        first, last = div_ceil(req.cached_len, self.page_size), div_ceil(req.device_len, self.page_size)
        nodes = self.prefix_cache.root_node.children
        while last - first > len(self.free_slots) and nodes:  # evict
            self.free_slots = torch.cat([self.free_slots, nodes.pop(next(iter(nodes))).value[:: self.page_size]])
        if last - first > len(self.free_slots):
            return False
        pages, self.free_slots = self.free_slots[: last - first], self.free_slots[last - first :]
        slots = (pages.unsqueeze(1) + torch.arange(self.page_size, dtype=torch.int32)).flatten()
        self.page_table[req.table_idx, first * self.page_size : last * self.page_size] = slots
        return True

    def cache_req(self, req: Req) -> None:
        whole = req.cached_len // self.page_size * self.page_size
        row, key = self.page_table[req.table_idx], tuple(req.input_ids[:whole].tolist())
        kept = whole if key and key not in self.prefix_cache.root_node.children else 0
        if kept:
            node = self.prefix_cache.root_node.children[key] = Node()
            node.value = row[:whole].clone()
        self.free_slots = torch.cat([self.free_slots, row[kept : req.cached_len : self.page_size].clone()])


class DecodeManager:
    def __init__(self, page_size: int) -> None:
        self.running_reqs: set[Req] = set()


class PrefillManager:
    def __init__(self, cache: CacheManager, table: TableManager, decode: DecodeManager) -> None:
        self.pending_list: list[Req] = []


class Scheduler:
    """One request at a time, its prompt in chunks; a finished one leaves its pages to a cache that nothing reads."""

    def _process_one_msg(self, message: Any) -> None:
        if isinstance(message, AbortBackendMsg):
            return self.abort(message.uid)
        assert isinstance(message, UserMsg)
        req = Req(message.uid, message.input_ids.pin_memory(), message.sampling_params.max_tokens)
        self.prefill_manager.pending_list.append(req)

    def abort(self, uid: int) -> None:
        pending, running = self.prefill_manager.pending_list, self.decode_manager.running_reqs
        (req,) = (each for each in [*pending, *running] if each.uid == uid)
        pending[:] = [each for each in pending if each is not req]
        running.discard(req)
        self.free(req)

    def free(self, req: Req) -> None:
        if req.table_idx >= 0:
            self.table_manager.rows.append(req.table_idx)
            self.cache_manager.cache_req(req)

    def _schedule_next_batch(self) -> Any:
        pending, running = self.prefill_manager.pending_list, self.decode_manager.running_reqs
        if not running and not pending:
            return None
        req = next(iter(running), None) or pending[0]
        if not running:
            if req.table_idx < 0:
                req.table_idx = self.table_manager.rows.pop()
            req.device_len = min(len(req.input_ids), req.cached_len + self.prefill_budget)
            req.chunked_req = req if req.device_len < len(req.input_ids) else None
            if req.chunked_req is None:
                pending.pop(0)
        if not self.cache_manager.allocate(req):
            raise RuntimeError("no pages")
        return SimpleNamespace(batch=SimpleNamespace(reqs=[req]))

    def _forward(self, step: Any) -> Any:
        output = self.engine.forward_batch(step.batch, None)
        self.decode_manager.running_reqs = {each for each in step.batch.reqs if each.chunked_req is None}
        return output

    def _process_last_data(self, data: Any) -> None:
        (req,), (_, tokens, _) = data[0].batch.reqs, data[1]
        if req.chunked_req is not None:
            return self.send_result([])
        req.input_ids = torch.cat([req.input_ids, tokens])
        req.max_tokens -= 1
        if not req.max_tokens:
            self.decode_manager.running_reqs.discard(req)
            self.free(req)
        self.send_result([DetokenizeMsg(uid=req.uid, next_token=int(tokens[0]), finished=not req.max_tokens)])
