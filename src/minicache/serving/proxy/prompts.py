"""What a router sees of a request: the hashes of its prompt, in blocks.

A worker's prefix cache has blocks of tokens. The proxy has no tokenizer, as it stands in front of any model; so it
hashes blocks of characters where the prompt is text. Texts with equal beginnings have tokens with equal beginnings, all
but perhaps the last of them, and that is all an affinity needs. Blocks of four characters a token, as English text has
them, are about as long as the worker's. (SGLang's router compares characters, too.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from minicache.fleet.views import RoutedRequest, route_tokens
from minicache.request import RequestId

CHARACTERS_PER_TOKEN: Final = 4
MAX_TOKENS: Final = 2**14
"""What comes after so many is not looked at: prompts that have these in common go together anyway."""


def routed_request(request_id: RequestId, body: Mapping[str, Any], block_size: int) -> RoutedRequest:
    """What a router sees of the body of a completion or a chat. Of several prompts, the first decides.

    Args:
        request_id: its name.
        body: as the client has sent it. What is wrong with it is for a worker to say: here it has no blocks.
        block_size: tokens of a block.
    """
    salt = body.get("cache_salt")
    salt = salt if isinstance(salt, str) else None
    prompt = body.get("prompt")
    if prompt is None:
        prompt = _conversation(body)
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(each, int) and each >= 0 for each in prompt):
        blocks = route_tokens(request_id, prompt[:MAX_TOKENS], block_size=block_size, cache_salt=salt).block_hashes
        return RoutedRequest(request_id, blocks, len(prompt))
    text = prompt if isinstance(prompt, str) else ""
    characters = list(map(ord, text[: CHARACTERS_PER_TOKEN * MAX_TOKENS]))
    size = CHARACTERS_PER_TOKEN * block_size
    blocks = route_tokens(request_id, characters, block_size=size, cache_salt=salt).block_hashes
    return RoutedRequest(request_id, blocks, len(text) // CHARACTERS_PER_TOKEN)


def _conversation(body: Mapping[str, Any]) -> str:
    """A chat as text, in the order in which chat templates have it: tools before messages, a role before its text.

    Little is in it that all chats have in common: whole blocks of that would draw all of them to one worker.
    """
    messages = body.get("messages")
    parts = [json.dumps(body["tools"])] if body.get("tools") else []
    for message in messages if isinstance(messages, list) else ():
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else ("", message)
        parts += [str(role), content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    return "\n".join(parts)
