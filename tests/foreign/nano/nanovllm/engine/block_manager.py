from collections import deque
from dataclasses import dataclass

import xxhash
from nanovllm.engine.sequence import Sequence


@dataclass
class Block:
    block_id: int
    ref_count: int = 0
    name: object = None


class BlockManager:
    """Blocks by reference; a full block keeps its name, a hash of all tokens up to its end, until it is reused."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_block_ids = deque(range(num_blocks))
        self.named: dict[object, int] = {}

    def name(self, sequence: Sequence, block: int) -> int:
        tokens = sequence.token_ids[: (block + 1) * self.size]
        digest = xxhash.xxh64()
        digest.update(repr(tokens).encode())
        return digest.intdigest()

    def admit(self, sequence: Sequence) -> bool:
        hits = []
        for block in range((len(sequence) - 1) // self.size):
            if (found := self.named.get(self.name(sequence, block))) is None:
                break
            hits.append(found)
        unused = [each for each in hits if not self.blocks[each].ref_count]
        if -(-len(sequence) // self.size) - len(hits) + len(unused) > len(self.free_block_ids):
            return False
        for each in unused:
            self.free_block_ids.remove(each)
        for each in hits:
            self.blocks[each].ref_count += 1
        sequence.block_table += hits
        sequence.num_cached_tokens = len(hits) * self.size
        return self.grow(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens; False: there are too few, and it keeps those that it has."""
        while len(sequence.block_table) * self.size < len(sequence):
            if not self.free_block_ids:
                return False
            block = self.blocks[self.free_block_ids.popleft()]
            if self.named.get(block.name) == block.block_id:
                del self.named[block.name]
            block.name, block.ref_count = None, 1
            sequence.block_table.append(block.block_id)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Name the blocks that its tokens in the cache fill."""
        for place in range(sequence.num_cached_tokens // self.size):
            block = self.blocks[sequence.block_table[place]]
            block.name = self.name(sequence, place)
            self.named.setdefault(block.name, block.block_id)

    def release(self, sequence: Sequence) -> None:
        for block_id in reversed(sequence.block_table):
            self.blocks[block_id].ref_count -= 1
            if not self.blocks[block_id].ref_count:
                self.free_block_ids.append(block_id)
        sequence.block_table.clear()
        sequence.num_cached_tokens = 0
