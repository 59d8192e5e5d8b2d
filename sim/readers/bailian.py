"""Bailian (Qwen): JSON lines of chats with arrivals in seconds and ids of blocks of 16 tokens."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.sim.readers.contents import check_num_contents
from pagedkv.sim.readers.json_rows import json_lines
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

BAILIAN_BLOCK_SIZE = 16
NO_PARENT = -1


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file.

    ``chat_id`` and ``parent_chat_id`` (-1: none) integers, ``timestamp`` in seconds, ``input_length`` and
    ``output_length`` in tokens, ``hash_ids`` integers of 64 bits; ``type``, ``turn`` and others are ignored.
    A session is a chat with all that descend from it; one whose parent the file does not hold starts a
    session with its siblings. Memory: two integers per request.
    """
    clock = Clock("timestamp", "s", 1.0, options)
    block_size = options.block_size or BAILIAN_BLOCK_SIZE
    root_of: dict[int, int] = {}
    for place, row in json_lines(source):
        chat = place.integer("chat_id", place.value(row, "chat_id"), least=0, most=2**63)
        parent = place.integer(
            "parent_chat_id", row.get("parent_chat_id", NO_PARENT), least=NO_PARENT, most=2**63
        )
        if chat in root_of:
            raise place.error(f"chat_id {chat} occurs a second time")
        root_of[chat] = chat if parent == NO_PARENT else root_of.get(parent, parent)
        arrival_s = clock.seconds(place, place.number("timestamp", place.value(row, "timestamp")))
        input_len = place.integer("input_length", place.value(row, "input_length"))
        output_len = output_tokens(place, "output_length", place.value(row, "output_length"), options, notes)
        ids = place.hash_ids("hash_ids", place.value(row, "hash_ids"))
        check_num_contents(place, "hash_ids", len(ids), input_len, block_size)
        if output_len:
            yield Row(place, arrival_s, input_len, output_len, ids, block_size, root_of[chat])


def _recognises(head: Head) -> bool:
    return "chat_id" in head.fields or "parent_chat_id" in head.fields


FORMAT = Format("bailian", "Bailian (Qwen) JSON lines", _recognises, read_rows)
