"""Sessions from the file of a published trace: Azure's and Mooncake's. Pure standard library.

Neither has the texts. Azure's has lengths; Mooncake's has a hash for every 512 tokens of a prompt too, and prompts with
the same hashes get the same tokens, so a prefix cache finds what it would have found there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path
from random import Random
from typing import Final

from minicache.simulator.prompts import VOCABULARY
from minicache_course.arena.machine import MAX_MODEL_LEN, Service
from minicache_course.arena.score import Load
from minicache_course.arena.workloads import CHAT, CODE, WINDOW, Session, Turn, microseconds
from minicache_course.errors import CourseError
from minicache_course.language import said

HASHED: Final = 512
"""Tokens that a hash of Mooncake's trace stands for."""

SHORT: Final = 64
"""A trace whose answers are shorter on average is taken for code completion, another for chats."""

Row = tuple[float, list[int], int]
"""When a request arrives, its prompt, and the tokens of its answer."""


def read_trace(file: Path) -> Load:
    """The requests of the first seconds of a trace, as many as fit into the arena's window, a session each.

    Args:
        file: a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure), or a JSON object a line with
            timestamp in milliseconds, input_length, output_length and hash_ids (Mooncake). Prompts and answers are cut
            to what the arena's machine takes.

    Returns:
        The load, its rate included.

    Raises:
        CourseError: the file cannot be read, or a line is not as it should be; the message names the line.
    """
    try:
        text = file.read_text(encoding="utf-8")
        rows = list(_mooncake(text) if text.lstrip().startswith("{") else _azure(text))
    except OSError as error:
        raise CourseError(said("{file} cannot be read: {error}", file=str(file), error=str(error))) from error
    except (KeyError, TypeError, ValueError) as error:
        wanted = said("an Azure CSV or a Mooncake JSONL")
        raise CourseError(
            said("{file} is not {wanted}: {error!r}", file=str(file), wanted=wanted, error=error)
        ) from error
    if not rows:
        raise CourseError(said("{file} has no requests", file=str(file)))
    start = min(time for time, _, _ in rows)
    early = sorted((row for row in rows if row[0] - start < WINDOW), key=lambda row: row[0])
    service = CODE if sum(length for _, _, length in early) < SHORT * len(early) else CHAT
    sessions = [_session(service, time - start, prompt, length) for time, prompt, length in early]
    return file.stem, len(sessions) / WINDOW, sessions


def _session(service: Service, start: float, prompt: list[int], length: int) -> Session:
    prompt = prompt[: MAX_MODEL_LEN - service.max_tokens]
    return Session(service, microseconds(start), (), (Turn(tuple(prompt), min(length, service.max_tokens)),))


def _azure(text: str) -> Iterator[Row]:
    for number, row in enumerate(csv.DictReader(StringIO(text))):
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield time, _tokens(f"request {number}", int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))


def _mooncake(text: str) -> Iterator[Row]:
    for line in filter(None, map(str.strip, text.splitlines())):
        row = json.loads(line)
        tokens = [token for each in row["hash_ids"] for token in _tokens(f"hash {each}", HASHED)]
        yield row["timestamp"] / 1000, tokens[: row["input_length"]], max(1, row["output_length"])


def _tokens(name: str, count: int) -> list[int]:
    return Random(name).choices(VOCABULARY, k=max(1, count))
