"""The custom dataset of ``vllm bench``: JSON lines of prompts."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.sim.readers.contents import (
    BYTES_PER_TOKEN,
    DEFAULT_BLOCK_SIZE,
    text_contents,
    text_tokens,
    token_contents,
)
from pagedkv.sim.readers.json_rows import json_lines
from pagedkv.sim.readers.row import Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file.

    ``prompt`` is a text, of which four bytes of UTF-8 make a token, or a list of token ids, which are exact;
    ``output_tokens`` where it is there, else as many as asked for (256 if nobody does). Other fields are
    ignored. Prompts share what their tokens share, by blocks of 16 tokens if nobody asks for others.
    """
    block_size = options.block_size or DEFAULT_BLOCK_SIZE
    for place, row in json_lines(source):
        prompt = place.value(row, "prompt")
        if isinstance(prompt, list):
            tokens = place.token_ids("prompt", prompt)
            input_len, contents = len(tokens), token_contents(tokens, block_size)
        elif isinstance(prompt, str):
            text = prompt.encode("utf-8", "surrogatepass")
            input_len, contents = text_tokens(text), text_contents(text, block_size)
            notes.assume(f"lengths by rule: a token is {BYTES_PER_TOKEN} bytes of UTF-8")
        else:
            raise place.field_error("prompt", "text or a list of token ids", prompt)
        if row.get("output_tokens") is None:
            output_len = options.output_len
            notes.assume(f"{output_len} output tokens where the file does not say")
        else:
            output_len = output_tokens(place, "output_tokens", row["output_tokens"], options, notes)
        if output_len:
            yield Row(place, None, input_len, output_len, contents, block_size)


def _recognises(head: Head) -> bool:
    return "prompt" in head.fields


FORMAT = Format("vllm-bench", "vllm bench custom dataset, JSON lines", _recognises, read_rows)
