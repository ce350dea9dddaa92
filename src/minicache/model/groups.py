"""Which layers of a model share a block table: those that see equally far, in groups of equally many.

All groups take their blocks from one pool (`minicache.memory.groups`), so a block has the same size in each of them.
Pure standard library. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LayerGroups(NamedTuple):
    """The groups of a model's layers.

    Attributes:
        windows: of each group the most tokens that its layers see; None: all.
        num_layers: of a group. Where it has fewer, a block has room that nothing uses.
        places: of each layer its group, and its index there.
    """

    windows: tuple[int | None, ...]
    num_layers: int
    places: tuple[tuple[int, int], ...]


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """Group layers by their windows, as vLLM does: a kind with many layers forms several groups.

    A group has as many layers as the rarest kind; or as the most frequent one, if that has less than 1.25 times as
    many. Groups without a window come first.

    Args:
        windows: of each layer, at least one.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    num_layers = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups: list[int | None] = []
    places = [(0, 0)] * len(windows)
    for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] is not None):
        for place, layer in enumerate(layers):
            places[layer] = len(groups) + place // num_layers, place % num_layers
        groups += [window] * -(-len(layers) // num_layers)
    return LayerGroups(tuple(groups), num_layers, tuple(places))
