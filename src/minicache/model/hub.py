"""Models by their hub name, "org/name": downloaded once, then found in the cache that all hub clients share.

No phase builds this module.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from minicache.errors import HubError, MissingExtraError

TIMEOUT: Final = 5.0
"""Seconds after which a hub that does not answer counts as out of reach."""

FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.*",
)
"""What is downloaded. Many a repository has its weights twice, in other formats too."""


def is_hub_name(name: str) -> bool:
    """Whether this can be the name of a model on the hub: "org/name"."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not name.endswith((".safetensors", ".gguf"))


def downloaded(name: str) -> Path | None:
    """The folder of a model that was downloaded before; None if it was not. The hub is not asked.

    Args:
        name: "org/name".
    """
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=[*FILES], local_files_only=True))
    except Exception:  # not installed, or not there: each release names it anew
        return None
    return folder if (folder / "config.json").is_file() else None


def download(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a model of the hub, on this machine.

    The hub is asked once whether it is there. If it is, what is missing here is downloaded; if not, a copy of an
    earlier download serves (HF_HOME says where they are). HF_HUB_OFFLINE=1 does not ask.

    Args:
        name: "org/name".
        cache_dir: the hub clients' cache; None: theirs.

    Raises:
        HubError: the hub cannot be reached, lacks the model or does not give it to you, and there is no copy here.
        MissingExtraError: `huggingface_hub` is not installed.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingExtraError(
            f"downloading {name} needs huggingface_hub: pip install 'minicache-course[hf]'"
        ) from error
    try:
        HfApi().model_info(name, timeout=TIMEOUT)  # snapshot_download alone would wait longer
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=[*FILES], etag_timeout=TIMEOUT))
    except (RepositoryNotFoundError, GatedRepoError) as error:
        raise HubError(f"there is no folder {name!r} here, and the hub does not give it: {error}") from error
    except Exception as error:  # a network can fail in many ways, and each release of the library names them anew
        reason = error
    try:
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=[*FILES], local_files_only=True))
    except Exception as error:
        raise HubError(
            f"there is no folder {name!r} here, the hub cannot be reached ({type(reason).__name__}: {reason}), and it "
            "was not downloaded before: give the path of a folder, or try again with a connection"
        ) from error
