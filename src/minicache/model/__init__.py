"""MiniGPT, its checkpoint and its training; and models from Hugging Face folders and GGUF files."""

from minicache.model.checkpoint import load_minigpt, save_minigpt
from minicache.model.config import MiniGPTConfig
from minicache.model.decoder import Decoder, DecoderConfig
from minicache.model.folder import decoder_config, load_folder
from minicache.model.gguf import load_gguf
from minicache.model.minigpt import MiniGPT

__all__ = [
    "Decoder",
    "DecoderConfig",
    "MiniGPT",
    "MiniGPTConfig",
    "decoder_config",
    "load_folder",
    "load_gguf",
    "load_minigpt",
    "save_minigpt",
]
