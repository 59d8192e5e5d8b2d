"""KV-event logs as JSON lines: which prompts an engine's cache stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pagedkv.event_batches import MEDIA
from pagedkv.events import DEVICE, BlocksRemoved, BlocksStored, Event
from pagedkv.sim.readers.json_rows import parse_json
from pagedkv.sim.readers.place import Place, is_64_bit
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row
from pagedkv.sim.readers.source import Source

_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_ARRAY_FIELDS = {
    _STORED: (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    _REMOVED: ("block_hashes", "medium", "group_idx"),
    _CLEARED: (),
}
_MOST_BLOCK_SIZE = 1 << 20


def event_line(timestamp: float, events: Iterable[Event]) -> str:
    r"""A line of such a log from events as the manager hands them over, or as a batch was decoded.

    ``timestamp`` in seconds by any clock that does not go back. Hashes are written as hexadecimal text.
    Events that are neither stored nor removed mean that nothing is cached any more.

    >>> from pagedkv.events import BlocksRemoved
    >>> event_line(1.5, [BlocksRemoved(0, (b"\x01\x02",))])
    '{"ts": 1.5, "events": [{"type": "BlockRemoved", "block_hashes": ["0102"]}]}\n'
    """
    return json.dumps({"ts": float(timestamp), "events": [_as_map(event) for event in events]}) + "\n"


def _as_map(event: Event) -> dict[str, Any]:
    if isinstance(event, BlocksStored):
        return {
            "type": _STORED,
            "block_hashes": [digest.hex() for digest in event.digests],
            "parent_block_hash": None if event.parent is None else event.parent.hex(),
            "token_ids": event.tokens.ravel().tolist(),
            "block_size": int(event.tokens.shape[1]),
            **_place_of(event),
        }
    if isinstance(event, BlocksRemoved):
        hashes = [digest.hex() for digest in event.digests]
        return {"type": _REMOVED, "block_hashes": hashes, **_place_of(event)}
    return {"type": _CLEARED}


def _place_of(event: BlocksStored | BlocksRemoved) -> dict[str, Any]:
    tier = {} if event.tier == DEVICE else {"medium": MEDIA.get(event.tier, event.tier)}
    return tier | ({"group_idx": event.group} if event.group else {})


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the prompts that a log tells of.

    A line is an event, a batch ``{"ts": seconds, "events": [...]}``, or a batch as vLLM writes it,
    ``[seconds, [event, ...], rank]``; an event is a map with its ``type``, or an array that begins with it.

    A stored event makes a request: its prompt is all blocks up to the event's last one. An event that goes on
    where the one before it ended belongs to the same request, as chunks of a prefill do. Output lengths are
    not in a log: one token is assumed. Prompts that were cached whole store nothing, so they are not there.
    Events of other tiers than the GPU and of other groups of layers than the first are left out and counted.
    Memory: one entry per block cached.
    """
    notes.assume("a log of stored blocks: prompts cached whole, partial blocks and outputs are not in it")
    notes.assume("1 output token per request")
    clock = Clock("ts", "s", 1.0, options)
    index = _Index()
    open_row: Row | None = None
    for place, stamp, event in _events(source):
        kind = place.text("type", event.get("type"))
        if event.get("medium") not in (None, "GPU"):
            notes.count("events of other tiers than the GPU left out")
            continue
        if event.get("group_idx") is not None and place.integer("group_idx", event["group_idx"], 0):
            notes.count("events of other groups of layers than the first left out")
            continue
        arrival_s = None if stamp is None else clock.seconds(place, stamp)
        if kind == _STORED:
            before = open_row
            open_row = _stored(place, arrival_s, event, index, before)
            if before is not None and open_row.place is not before.place:
                yield before
        elif kind == _REMOVED:
            index.remove(place, event, notes)
        elif kind == _CLEARED:
            index.clear()
        else:
            raise place.field_error("type", f"{_STORED}, {_REMOVED} or {_CLEARED}", kind)
    if open_row is not None:
        yield open_row


class _Index:
    """The blocks cached at this point of the log."""

    def __init__(self) -> None:
        self._blocks: dict[int | str, Any] = {}  # block -> parent
        self.block_size = 0

    def prompt_up_to(self, place: Place, block: int | str) -> list[int | str]:
        """The hashes of a prompt whose last block is this one."""
        chain: list[int | str] = []
        at: int | str | None = block
        while at is not None:
            if at not in self._blocks:
                raise place.field_error("parent_block_hash", "behind blocks stored and not removed", block)
            chain.append(at)
            at = self._blocks[at]
        return chain[::-1]

    def store(self, place: Place, parent: int | str | None, hashes: list[int | str]) -> None:
        """Add blocks behind ``parent``."""
        for i, block in enumerate(hashes):
            if self._blocks.setdefault(block, parent) != parent or block == parent:
                raise place.field_error(f"block_hashes[{i}]", "a block behind one parent only", block)
            parent = block

    def remove(self, place: Place, event: dict[str, Any], notes: Notes) -> None:
        """Take blocks out."""
        for block in _hashes(place, event):
            if self._blocks.pop(block, self) is self:
                notes.count("removed blocks that were not stored in this log")

    def clear(self) -> None:
        """Take all out."""
        self._blocks.clear()


def _stored(
    place: Place, arrival_s: float | None, event: dict[str, Any], index: _Index, before: Row | None
) -> Row:
    """The prompt up to the event's last block; it has the place of ``before`` if it goes on from that."""
    hashes = _hashes(place, event)
    if not hashes:
        raise place.field_error("block_hashes", "at least one block", hashes)
    block_size = place.integer("block_size", place.value(event, "block_size"), most=_MOST_BLOCK_SIZE)
    if index.block_size not in (0, block_size):
        raise place.field_error("block_size", f"{index.block_size} as before", block_size)
    index.block_size = block_size
    tokens = event.get("token_ids")
    if tokens is not None and len(place.token_ids("token_ids", tokens)) != block_size * len(hashes):
        raise place.field_error("token_ids", f"{len(hashes)} blocks of {block_size} tokens", tokens)
    parent = event.get("parent_block_hash")
    if parent is not None:
        parent = _hash(place, "parent_block_hash", parent)
    adapter = _adapter(place, event)
    goes_on = before is not None and parent == before.contents[-1] and adapter == before.adapter
    if before is not None and goes_on:
        prompt = [*before.contents, *hashes]  # spares the walk
    else:
        prompt = ([] if parent is None else index.prompt_up_to(place, parent)) + hashes
    if len(set(prompt)) != len(prompt):
        raise place.field_error("block_hashes", "different from each other and from those before", hashes)
    index.store(place, parent, hashes)
    input_len = place.integer("block_hashes", block_size * len(prompt))
    if before is not None and goes_on:
        return before._replace(input_len=input_len, contents=prompt)
    return Row(place, arrival_s, input_len, 1, prompt, block_size, adapter=adapter)


def _adapter(place: Place, event: dict[str, Any]) -> str | None:
    if event.get("lora_name") is not None:
        return place.text("lora_name", event["lora_name"])
    if event.get("lora_id") is not None:
        return str(place.integer("lora_id", event["lora_id"], least=0))
    return None


def _hashes(place: Place, event: dict[str, Any]) -> list[int | str]:
    values = place.value(event, "block_hashes")
    if not isinstance(values, list):
        raise place.field_error("block_hashes", "a list of hashes", values)
    return [_hash(place, f"block_hashes[{i}]", value) for i, value in enumerate(values)]


def _hash(place: Place, field: str, value: Any) -> int | str:
    if is_64_bit(value) or (type(value) is str and 1 <= len(value) <= 128):
        known: int | str = value
        return known
    raise place.field_error(field, "an integer of 64 bits or text", value)


def _events(source: Source) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    """Yield (place, time or None, event as a map)."""
    for place, line in source.lines():
        value = parse_json(place, line)
        stamp, events, batched = _batch(place, value)
        for i, event in enumerate(events):
            where = place._replace(item=f"event {i + 1}") if batched else place
            yield where, stamp, _event(where, event)


def _batch(place: Place, value: Any) -> tuple[Any, list[Any], bool]:
    if isinstance(value, dict) and "events" in value:
        stamp, events = place.value(value, "ts"), value["events"]
    elif isinstance(value, list) and len(value) in (2, 3) and isinstance(value[1], list):
        stamp, events = value[0], value[1]
    else:
        return None, [value], False
    if not isinstance(events, list):
        raise place.field_error("events", "a list", events)
    return place.number("ts", stamp), events, True


def _event(place: Place, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if not (isinstance(value, list) and value and isinstance(value[0], str)):
        raise place.field_error("event", "a map with its type, or an array that begins with it", value)
    names = _ARRAY_FIELDS.get(value[0], ())
    return {"type": value[0], **dict(zip(names, value[1:], strict=False))}


def _recognises(head: Head) -> bool:
    kind = head.fields.get("type")
    if (isinstance(kind, str) and kind in _ARRAY_FIELDS) or "events" in head.fields:
        return True
    text = head.content.lstrip()
    if not text.startswith(b"["):
        return False
    inside = text[1:].lstrip()
    return inside[:1].isdigit() or any(inside.startswith(f'"{kind}"'.encode()) for kind in _ARRAY_FIELDS)


FORMAT = Format("kv-events", "KV-event log, JSON lines", _recognises, read_rows)
