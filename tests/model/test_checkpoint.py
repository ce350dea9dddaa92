"""Checkpoints: round trip, and files that are refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minicache.errors import CheckpointError
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT, MiniGPTConfig, load_minigpt, save_minigpt
from minicache.model.checkpoint import FORMAT, SHIPPED


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny random model's checkpoint."""
    config = MiniGPTConfig(
        Tokenizer().vocab_size, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=99.0
    )
    save_minigpt(MiniGPT(config), tmp_path / "tiny.safetensors")
    return tmp_path / "tiny.safetensors"


def metadata_of(path: Path) -> dict[str, str]:
    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    metadata: dict[str, str] = json.loads(header[8 : 8 + length])["__metadata__"]
    return metadata


def test_round_trip(tmp_path: Path) -> None:
    model = MiniGPT(MiniGPTConfig(Tokenizer().vocab_size, num_layers=1, max_seq_len=32, norm_eps=1e-6))
    save_minigpt(model, tmp_path / "m.safetensors")
    loaded = load_minigpt(tmp_path / "m.safetensors")
    assert loaded.config == model.config
    assert not loaded.training
    token_ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(token_ids), model(token_ids), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]


def test_equal_weights_make_equal_files(tmp_path: Path, saved: Path) -> None:
    for number in range(8):
        save_minigpt(load_minigpt(saved), tmp_path / f"{number}.safetensors")
        assert (tmp_path / f"{number}.safetensors").read_bytes() == saved.read_bytes()


def test_dtype_is_taken(saved: Path) -> None:
    model = load_minigpt(saved, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_the_shipped_checkpoint_is_small_and_loads() -> None:
    assert SHIPPED.stat().st_size <= 4_000_000
    model = load_minigpt()
    assert model.config == MiniGPTConfig(vocab_size=Tokenizer().vocab_size)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def no_file(path: Path) -> None:
    path.unlink()


def half_a_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"embed_tokens.weight": [1.0]}))


def no_metadata(path: Path) -> None:
    save_file(load_file(path), path)


def half_a_metadata(path: Path) -> None:
    save_file(load_file(path), path, {FORMAT: metadata_of(path)[FORMAT][:-5]})


def other_metadata(key: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        about = json.loads(metadata_of(path)[FORMAT])
        if value is None:
            del about[key]
        else:
            about[key] = value
        save_file(load_file(path), path, {FORMAT: json.dumps(about)})

    return change


def a_tensor_less(path: Path) -> None:
    metadata, tensors = metadata_of(path), load_file(path)
    del tensors["norm.weight"]
    save_file(tensors, path, metadata)


def a_tensor_of_another_shape(path: Path) -> None:
    metadata, tensors = metadata_of(path), load_file(path)
    tensors["norm.weight"] = torch.zeros(3)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("spoil", "saying"),
    [
        (no_file, "no checkpoint at"),
        (half_a_file, "cannot be read"),
        (a_pickle, "cannot be read"),
        (no_metadata, "no MiniGPT checkpoint"),
        (half_a_metadata, "says about itself"),
        (other_metadata("vocabulary", "0123"), "another vocabulary"),
        (other_metadata("config", "large"), "do not fit"),
        (other_metadata("config", {"vocab_size": 0}), "do not fit"),
        (other_metadata("config", {"vocab_size": 64, "num_layers": 10**9}), "1,000,000,000 layers, and"),
        (other_metadata("config", {"depth": 4}), "do not fit"),
        (other_metadata("config", None), "says about itself"),
        (a_tensor_less, "norm.weight"),
        (a_tensor_of_another_shape, "norm.weight"),
    ],
)
def test_other_files_are_refused(saved: Path, spoil: Callable[[Path], None], saying: str) -> None:
    spoil(saved)
    with pytest.raises(CheckpointError, match=saying):
        load_minigpt(saved)


def test_a_folder_that_is_not_there_is_refused(saved: Path) -> None:
    model = load_minigpt(saved)
    with pytest.raises(CheckpointError, match="cannot write"):
        save_minigpt(model, saved.parent / "nowhere" / "m.safetensors")
