"""A tier in Redis: a real server, of the Debian package redis-server, on a Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from redis import Redis, RedisError

from minicache.engine import LLM, SamplingParams
from minicache.tiers import redis
from minicache.tiers.redis import RedisTier
from minicache.tiers.specs import open_tier

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[(7 * number + position) % 50 for position in range(70)] for number in range(2)]


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


class Server:
    """A Redis server that can be stopped."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("redis-server")
        if found is None:
            if os.environ.get("MINICACHE_REQUIRE_REDIS") == "1":
                pytest.fail("no redis-server here: install Debian's package redis-server")
            pytest.skip("no redis-server here")
        self.url = f"unix://{folder}/redis.sock"
        command = [found, "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            with suppress(RedisError):
                if Redis.from_url(self.url).ping():
                    return
            time.sleep(0.05)
        pytest.fail("redis-server does not answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        started = Server(Path(stack.enter_context(TemporaryDirectory(dir="/tmp"))))  # a socket's path is short
        stack.callback(started.stop)
        yield started


def answers(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


def counts(llm: LLM) -> dict[str, int]:
    assert llm.tiers is not None
    assert llm.tiers.flush(10)
    return {what: number for what, number, _ in llm.tiers.take_counts()}


def test_redis_keeps_records(server: Server) -> None:
    tier = open_tier(server.url)
    assert isinstance(tier, RedisTier)
    keys = [key(number) for number in range(4)]
    for number in (0, 1, 3):
        tier.store(keys[number], b"%d" % number)
    tier.store(keys[0], b"another")
    assert tier.lookup(keys) == 2
    assert tier.load(keys) == [b"0", b"1"]
    tier.touch(keys)
    tier.touch([])
    tier.discard([])
    tier.discard(keys[:1])
    assert tier.lookup(keys) == 0
    assert RedisTier(server.url).load(keys[1:]) == [b"1"]


def test_engines_share_blocks_and_go_on_when_redis_is_gone(server: Server) -> None:
    expected = answers(LLM(num_blocks=40))
    first = LLM(num_blocks=40, kv_tiers=[server.url])
    assert answers(first) == expected
    assert counts(first)["stored_bytes"] > 0
    second = LLM(num_blocks=40, kv_tiers=[server.url])
    assert answers(second) == expected
    assert counts(second)["hits"] == 8
    third = LLM(num_blocks=40, kv_tiers=[server.url])
    server.stop()
    for llm in (first, second, third):
        assert answers(llm) == expected
        assert counts(llm).get("hits", 0) == 0
    assert answers(LLM(num_blocks=40, kv_tiers=[server.url])) == expected


def test_engines_go_on_when_redis_hangs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "SECONDS", 0.2)
    expected = answers(LLM(num_blocks=40))
    first = LLM(num_blocks=40, kv_tiers=[server.url])
    assert answers(first) == expected
    counts(first)
    llm = LLM(num_blocks=40, kv_tiers=[server.url])
    server.process.send_signal(signal.SIGSTOP)
    assert answers(llm) == expected
    found = counts(llm)
    assert "hits" not in found
    assert found["errors"] > 0


def test_a_url_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no tier"):
        open_tier("http://127.0.0.1")
