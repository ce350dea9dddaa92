"""MiniGPT against transformers' Llama, and with a cache against without."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache.errors import CacheOverflowError
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.model.minigpt import rotate


def random_model(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, num_layers: int = 2) -> MiniGPT:
    torch.manual_seed(0)
    config = MiniGPTConfig(
        vocab_size=50,
        hidden_size=24,  # not num_heads · head_dim: the two are independent
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=40,
        max_seq_len=64,
        rope_theta=500.0,
    )
    model = MiniGPT(config).eval()
    for parameter in model.parameters():  # norms included: a gain of one would hide a missing one
        torch.nn.init.normal_(parameter, mean=0.1, std=0.5)
    return model


def cache_for(model: MiniGPT, batch_size: int, max_seq_len: int = 64) -> KVCache:
    config = model.config
    return KVCache(config.num_layers, batch_size, config.num_kv_heads, max_seq_len, config.head_dim)


def in_chunks(model: MiniGPT, token_ids: Tensor, chunks: Sequence[int]) -> Tensor:
    cache = cache_for(model, token_ids.shape[0])
    return torch.cat([model(chunk, cache) for chunk in token_ids.split(list(chunks), dim=1)], dim=1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_logits_are_those_of_transformers_llama(num_heads: int, num_kv_heads: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = random_model(num_heads, num_kv_heads)
    config = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            hidden_act="silu",
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
        )
    ).eval()
    llama.model.load_state_dict(model.state_dict())
    token_ids = torch.randint(0, config.vocab_size, (3, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids), llama(token_ids).logits, atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 16]),
    batch_size=st.integers(1, 3),
)
def test_a_cache_changes_no_logits_for_any_shape(
    chunks: list[int], num_kv_heads: int, group: int, head_dim: int, batch_size: int
) -> None:
    model = random_model(num_kv_heads * group, num_kv_heads, head_dim, num_layers=1)
    token_ids = torch.randint(0, 50, (batch_size, sum(chunks)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(model, token_ids, chunks), model(token_ids), atol=1e-4, rtol=0)


def test_positions_may_differ_between_sequences() -> None:
    """A cache that places each sequence by itself: row 0 two positions further on than row 1."""

    class Shifted(KVCache):
        def positions(self, num_new_tokens: int) -> Tensor:
            return super().positions(num_new_tokens) + torch.tensor([[2], [0]])

    model = random_model()
    config = model.config
    row = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(5))
    cache = Shifted(config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    with torch.no_grad():
        logits = model(row.repeat(2, 1), cache)
        # Rotary attention depends on distances only: the same tokens further on give the same logits …
        torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
        # … though the keys were turned further.
        k, _ = cache.read(0)
    assert not torch.allclose(k[0], k[1])


@pytest.mark.parametrize(
    ("token_ids", "error", "saying"),
    [
        ([[1, 2]], TypeError, "list"),
        (torch.tensor([[1.0]]), TypeError, "float32"),
        (torch.tensor([[1]], dtype=torch.int32), TypeError, "int32"),
        (torch.tensor([1, 2]), ValueError, r"\[2\]"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, r"\[1, 0\]"),
        (torch.tensor([[50]]), IndexError, "50"),
        (torch.tensor([[3, -1]]), IndexError, "-1"),
        (torch.zeros(1, 65, dtype=torch.int64), ValueError, "64"),
    ],
)
def test_wrong_token_ids_are_refused_and_the_cache_stays(
    token_ids: Tensor, error: type[Exception], saying: str
) -> None:
    model = random_model()
    cache = cache_for(model, 1, max_seq_len=100)
    for given_cache in (None, cache):
        with pytest.raises(error, match=saying):
            model(token_ids, given_cache)
    assert cache.num_tokens == 0
    assert cache.read(0)[0].shape[2] == 0


def test_a_full_cache_is_refused_and_stays() -> None:
    model = random_model()
    cache = cache_for(model, 1, max_seq_len=8)
    token_ids = torch.zeros(1, 6, dtype=torch.int64)
    with torch.no_grad():
        model(token_ids, cache)
        with pytest.raises(CacheOverflowError):
            model(token_ids, cache)
        assert cache.num_tokens == 6
        model(token_ids[:, :2], cache)
    assert cache.num_tokens == 8


def test_parameters_are_counted_once() -> None:
    assert (
        MiniGPT(MiniGPTConfig(vocab_size=412)).num_parameters()
        == 412 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128) + 128
    )


def test_the_two_halves_are_the_whole() -> None:
    """hidden_states and logits give what forward gives; of the positions that are asked for, and no others."""
    model = random_model()
    token_ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden = model.hidden_states(token_ids)
        assert hidden.shape == (2, 9, model.config.hidden_size)
        assert model.logits(hidden).equal(model(token_ids))
        torch.testing.assert_close(model.logits(hidden[:, -1]), model(token_ids)[:, -1])
        through_cache = model.hidden_states(token_ids, cache_for(model, 2))
        torch.testing.assert_close(through_cache, hidden, atol=1e-4, rtol=0)
    with pytest.raises(IndexError):
        model.hidden_states(torch.tensor([[50]]))


def test_rotation_is_the_textbook_formula_to_the_last_bit() -> None:
    """Rounded as written, without a fused multiply-add: else a retrained checkpoint is not the shipped one."""
    torch.manual_seed(0)
    heads = torch.randn(2, 50, 3, 32)
    angles = torch.outer(torch.arange(50.0), 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)).repeat(1, 2)[:, None]
    first, second = heads.chunk(2, dim=-1)
    expected = heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    cos, sin = angles.cos(), torch.cat([-angles[..., :16].sin(), angles[..., :16].sin()], dim=-1)
    assert torch.equal(rotate(heads, cos, sin), expected)
