"""MiniGPT: the model itself, its checkpoint, its training and its measurement."""

from minicache.model.checkpoint import load_minigpt, save_minigpt
from minicache.model.config import MiniGPTConfig
from minicache.model.minigpt import MiniGPT

__all__ = ["MiniGPT", "MiniGPTConfig", "load_minigpt", "save_minigpt"]
