"""MiniGPT: the model itself, its checkpoint and its training."""

from minicache.model.checkpoint import load_minigpt, save_minigpt
from minicache.model.config import MiniGPTConfig
from minicache.model.minigpt import MiniGPT

__all__ = ["MiniGPT", "MiniGPTConfig", "load_minigpt", "save_minigpt"]
