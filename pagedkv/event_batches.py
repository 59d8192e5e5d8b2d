"""The event stream as vLLM's KV-event messages, for routers that read those: encode and decode.

`event_ring` keeps them for late readers, `event_follower` is such a reader.

One message is msgpack, with out-of-band a batch number that counts from 0 without gaps:

    [timestamp, [event, ...], data_parallel_rank]

    tag                fields, in this order
    BlockStored        block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
    BlockRemoved       block_hashes, medium
    AllBlocksCleared   none

An event is a map of its fields with the tag under "type" (vLLM since mid 2026), or an array that begins
with the tag (before that); see `WireFormat`. ``medium`` is the tier: "GPU" for the device, "CPU" for the
host, else its name. ``group_idx`` is the group of layers, 0 but for a hybrid manager. ``lora_id`` and
``lora_name`` are null: the digests tell namespaces and media apart, the other fields do not. A router that
hashes ``token_ids`` by itself should follow managers of one namespace only; one that looks up
`prefix_digests` may follow any.

Needs msgspec: ``pip install "pagedkv[events]"``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from pagedkv.content import as_token_array
from pagedkv.errors import PagedKVError, require_count
from pagedkv.events import DEVICE, HOST, BlocksCleared, BlocksRemoved, BlocksStored, Event

HashKind = Literal["int", "bytes"]
Layout = Literal["map", "array"]


class MissedBatches(PagedKVError):
    """Batches ``first`` to ``last`` cannot be read any more: a snapshot has to stand in for them."""

    def __init__(self, first: int, last: int, oldest: int) -> None:
        """Say which are missing; ``oldest`` is the first batch after them."""
        super().__init__(f"batches {first} to {last} were missed, the oldest one left is {oldest}")
        self.first, self.last, self.oldest = first, last, oldest


class EventBatch(NamedTuple):
    """One encoded message and its number.

    A snapshot has the number of the last batch that it stands in for: reading goes on with ``number + 1``.
    """

    number: int
    payload: bytes

    def frames(self, topic: bytes = b"") -> tuple[bytes, bytes, bytes]:
        """The parts of a ZeroMQ message as vLLM publishes it: topic, number (8 bytes, big-endian), payload.

        >>> EventBatch(258, b"...").frames(b"kv")
        (b'kv', b'\\x00\\x00\\x00\\x00\\x00\\x00\\x01\\x02', b'...')
        """
        return topic, self.number.to_bytes(8, "big"), self.payload


class DecodedBatch(NamedTuple):
    """What a message says. ``timestamp`` in seconds; digests are 8 bytes where the hashes were ints."""

    timestamp: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None


class _Stored(NamedTuple):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _Removed(NamedTuple):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(NamedTuple):
    pass


class _Message(NamedTuple):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_KINDS: dict[str, Any] = {"BlockStored": _Stored, "BlockRemoved": _Removed, "AllBlocksCleared": _Cleared}
MEDIA = {HOST: "CPU"}
"""What vLLM calls tiers; others go by their name, and the device by what `WireFormat` says."""

_TIERS: dict[str | None, str] = {None: DEVICE, "GPU": DEVICE, "CPU": HOST}
_TAGS = {kind: tag for tag, kind in _KINDS.items()}


def int_hash(digest: bytes) -> int:
    """What a batch with int hashes calls a digest: its last 8 bytes as a big-endian number.

    >>> int_hash(bytes(31) + b"\\x07")
    7
    """
    return int.from_bytes(digest[-8:], "big")


@dataclass(frozen=True)
class WireFormat:
    """How events are written.

    ``hashes``: "int", the last 64 bits of a digest, which every router reads; or "bytes", whole digests.
    ``layout``: "map" or "array", see the module. ``medium`` is what the device is called;
    ``data_parallel_rank`` tells the replicas of one service apart. Raises ``PagedKVError`` for any other
    choice.
    """

    hashes: HashKind = "int"
    layout: Layout = "map"
    medium: str = "GPU"
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        """Refuse what no reader would understand."""
        for name, value, known in (("hashes", self.hashes, HashKind), ("layout", self.layout, Layout)):
            if value not in get_args(known):
                raise PagedKVError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
        if not isinstance(self.medium, str):
            raise PagedKVError(f"medium must be a string, got {self.medium!r}")
        require_count("data_parallel_rank", self.data_parallel_rank, 0)

    def encode(self, events: Iterable[Event], timestamp: float) -> bytes:
        """One message. ``timestamp``: seconds since the epoch, by the caller's clock.

        Raises ``PagedKVError`` without msgspec. Cost: O(tokens), about 1 us per block of 16.

        >>> WireFormat(layout="array").encode([BlocksCleared(0)], 0.0)[10:]
        b'\\x91\\x91\\xb0AllBlocksCleared\\x00'
        """
        items = [self._item(event) for event in events]
        message: bytes = require_msgspec().msgpack.encode([float(timestamp), items, self.data_parallel_rank])
        return message

    def _item(self, event: Event) -> dict[str, Any] | list[Any]:
        fields = self._fields(event)
        tag = _TAGS[type(fields)]
        return {"type": tag, **fields._asdict()} if self.layout == "map" else [tag, *fields]

    def _fields(self, event: Event) -> _Stored | _Removed | _Cleared:
        if isinstance(event, BlocksCleared):
            return _Cleared()
        hashes = [self._hash(digest) for digest in event.digests]
        if isinstance(event, BlocksRemoved):
            return _Removed(hashes, self._medium(event.tier), event.group)
        parent = None if event.parent is None else self._hash(event.parent)
        tokens, block_size = event.tokens.ravel().tolist(), event.tokens.shape[1]
        medium, group = self._medium(event.tier), event.group
        return _Stored(hashes, parent, tokens, block_size, medium=medium, group_idx=group)

    def _medium(self, tier: str) -> str:
        return self.medium if tier == DEVICE else MEDIA.get(tier, tier)

    def _hash(self, digest: bytes) -> int | bytes:
        return int_hash(digest) if self.hashes == "int" else digest


def decode_batch(payload: bytes, first_number: int = 0) -> DecodedBatch:
    """Read a message of either layout, with either hashes; its events are numbered from ``first_number``.

    Raises ``PagedKVError`` for anything else, and without msgspec.
    Cost: O(tokens), about 2 us per block of 16.

    >>> decode_batch(WireFormat().encode([BlocksCleared(5)], 1.5), first_number=5)
    DecodedBatch(timestamp=1.5, events=(BlocksCleared(number=5),), data_parallel_rank=0)
    """
    msgspec = require_msgspec()
    try:
        message = msgspec.msgpack.decode(payload, type=_Message)
        events = [_event(_parse(item), n) for n, item in enumerate(message.events, first_number)]
    except (msgspec.DecodeError, PagedKVError, RecursionError) as error:
        raise PagedKVError(f"{len(payload)} bytes are no batch of events: {error}") from None
    return DecodedBatch(message.ts, tuple(events), message.data_parallel_rank)


def _parse(item: Any) -> Any:
    """The typed fields of an event, whichever its layout; fields that are not ours are passed over."""
    as_map = isinstance(item, dict)
    tag = item.get("type") if as_map else next(iter(item), None) if isinstance(item, list) else None
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise PagedKVError(f"unknown kind of event {tag!r}")
    names = kind._fields
    fields = [item.get(name) for name in names] if as_map else item[1 : len(names) + 1]
    # without this, convert would read a string as base64
    return require_msgspec().convert(fields, kind, builtin_types=(bytes,))


def _event(fields: Any, number: int) -> Event:
    if isinstance(fields, _Cleared):
        return BlocksCleared(number)
    digests = tuple(_digest(value) for value in fields.block_hashes)
    tier, group = _TIERS.get(fields.medium, fields.medium), fields.group_idx or 0
    if isinstance(fields, _Removed):
        return BlocksRemoved(number, digests, group=group, tier=tier)
    count, size, tokens = len(digests), fields.block_size, as_token_array(fields.token_ids)
    if size < 1 or len(tokens) != count * size:
        raise PagedKVError(f"{count} blocks of {size} tokens come with {len(tokens)} tokens")
    parent = None if fields.parent_block_hash is None else _digest(fields.parent_block_hash)
    return BlocksStored(number, parent, digests, tokens.reshape(count, size), group=group, tier=tier)


def _digest(value: int | bytes) -> bytes:
    # some engines write the same 64 bits as a signed number
    return value if isinstance(value, bytes) else (value % 2**64).to_bytes(8, "big")


def require_msgspec() -> ModuleType:
    """The package, or an error that says how to get it."""
    try:
        import msgspec
    except ImportError:
        raise PagedKVError('event batches need msgspec: pip install "pagedkv[events]"') from None
    return msgspec
