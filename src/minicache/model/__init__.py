"""MiniGPT, its checkpoint and its training; and models from Hugging Face folders and GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.model.checkpoint import load_minigpt as load_minigpt
    from minicache.model.checkpoint import save_minigpt as save_minigpt
    from minicache.model.config import MiniGPTConfig as MiniGPTConfig
    from minicache.model.decoder import Decoder as Decoder
    from minicache.model.decoder import DecoderConfig as DecoderConfig
    from minicache.model.folder import decoder_config as decoder_config
    from minicache.model.folder import load_folder as load_folder
    from minicache.model.gguf import load_gguf as load_gguf
    from minicache.model.minigpt import MiniGPT as MiniGPT

__getattr__, __dir__ = lazily(
    __name__,
    checkpoint="load_minigpt save_minigpt",
    config="MiniGPTConfig",
    decoder="Decoder DecoderConfig",
    folder="decoder_config load_folder",
    gguf="load_gguf",
    minigpt="MiniGPT",
)
