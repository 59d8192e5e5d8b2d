"""ShareGPT-like conversations in JSON: their lengths by a stated rule, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagedkv.sim.readers.contents import BYTES_PER_TOKEN, DEFAULT_BLOCK_SIZE, text_contents, text_tokens
from pagedkv.sim.readers.json_rows import as_object, json_array, json_lines
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Format, Head, Notes, ReadOptions, Row
from pagedkv.sim.readers.source import Source

ANSWERERS = frozenset(("gpt", "assistant", "chatgpt", "bing", "bard", "claude", "model"))
"""Who speaks the output of a request."""

_LISTS = ("conversations", "conversation", "messages")
_SPEAKERS, _TEXTS = ("from", "role"), ("value", "content")


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file: a JSON array of conversations, or one conversation per line.

    A conversation has its messages under ``conversations``, ``conversation`` or ``messages``; a message has
    ``from`` or ``role`` and ``value`` or ``content``. Each answer makes a request: its output is the answer,
    its prompt all text before it. A token is four bytes of UTF-8. Prompts share what their texts share, by
    full blocks (of 16 tokens if nobody asks for others); a conversation is a session whose turns follow at
    once. What makes no request is counted: conversations without an answer, answers without a prompt.
    """
    notes.assume(f"lengths by rule: a token is {BYTES_PER_TOKEN} bytes of UTF-8")
    block_size = options.block_size or DEFAULT_BLOCK_SIZE
    for session, (place, conversation) in enumerate(_conversations(source)):
        prompt, turns = bytearray(), 0
        for is_answer, text in _messages(place, conversation):
            if is_answer and prompt:
                content = bytes(prompt)
                think_s = 0.0 if turns else None
                yield Row(
                    place,
                    None,
                    text_tokens(content),
                    text_tokens(text),
                    text_contents(content, block_size),
                    block_size,
                    session,
                    think_s,
                )
                turns += 1
            elif is_answer:
                notes.count("answers without a prompt made no request")
            prompt += text
        if not turns:
            notes.count("conversations without a request")


def _conversations(source: Source) -> Iterator[tuple[Place, dict[str, Any]]]:
    if source.head(1 << 16).lstrip().startswith(b"["):
        for place, value in json_array(source, "conversation"):
            yield place, as_object(place, value)
    else:
        yield from json_lines(source)


def _messages(place: Place, conversation: dict[str, Any]) -> Iterator[tuple[bool, bytes]]:
    name = _one_of(place, conversation, _LISTS, "")
    messages = conversation[name]
    if not isinstance(messages, list):
        raise place.field_error(name, "a list of messages", messages)
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, dict):
            raise place.field_error(where, "an object", message)
        speaker, text = (_one_of(place, message, names, where) for names in (_SPEAKERS, _TEXTS))
        said = message[text]
        if not isinstance(said, str):
            raise place.field_error(f"{where}.{text}", "text", said)
        role = place.text(f"{where}.{speaker}", message[speaker])
        # a lone surrogate, which JSON can hold and UTF-8 cannot, has three bytes
        yield role.lower() in ANSWERERS, said.encode("utf-8", "surrogatepass")


def _one_of(place: Place, row: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in row:
            return name
    raise place.error(f"{where + ': ' if where else ''}{' or '.join(names)} is missing")


def _recognises(head: Head) -> bool:
    if any(name in head.fields for name in _LISTS):
        return True
    text = head.content.lstrip()
    inside = text[1:].lstrip()
    return text.startswith(b"[") and inside[:1] in (b"{", b"]", b"") and not _is_json(text)


def _is_json(text: bytes) -> bool:
    """Tell whether it is JSON that is no list of conversations."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not all(isinstance(item, dict) and any(name in item for name in _LISTS) for item in value)


FORMAT = Format("sharegpt", "ShareGPT-like conversations", _recognises, read_rows)
