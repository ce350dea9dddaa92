"""What a config refuses."""

from typing import Any

import pytest

from minicache.model import MiniGPTConfig


def test_defaults_are_the_shipped_shape() -> None:
    config = MiniGPTConfig(vocab_size=10)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (4, 128, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"vocab_size": 0}, ValueError),
        ({"num_layers": -1}, ValueError),
        ({"hidden_size": 12.0}, TypeError),
        ({"hidden_size": "128"}, TypeError),
        ({"num_layers": True}, TypeError),
        ({"num_heads": 5, "num_kv_heads": 2}, ValueError),
        ({"head_dim": 7}, ValueError),
        ({"rope_theta": 0.0}, ValueError),
        ({"norm_eps": float("nan")}, ValueError),
        ({"norm_eps": "small"}, TypeError),
    ],
)
def test_a_shape_that_cannot_be_is_refused(sizes: dict[str, Any], error: type[Exception]) -> None:
    (name, *_) = sizes
    with pytest.raises(error, match=name if "heads" not in name else "heads"):
        MiniGPTConfig(**{"vocab_size": 10, **sizes})
