"""What besides tokens must be equal for two blocks to hold the same K and V."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.errors import PagedKVError


@dataclass(frozen=True)
class Namespace:
    """Keeps prefix reuse inside one tenant, adapter and set of weights.

    Sequences share cached blocks only if every field is equal. ``salt`` separates tenants,
    ``adapter`` and ``adapter_version`` name a LoRA as loaded (raise the version when weights are
    reloaded under the same name), ``weights`` names the base weights.
    """

    salt: str = ""
    adapter: str = ""
    adapter_version: int = 0
    weights: str = ""

    def __post_init__(self) -> None:
        """Refuse fields of other types, which might not compare or hash alike in another process."""
        for name, kind in (("salt", str), ("adapter", str), ("adapter_version", int), ("weights", str)):
            if type(getattr(self, name)) is not kind:
                raise PagedKVError(f"{name} must be {kind.__name__}, got {getattr(self, name)!r}")


class Media(NamedTuple):
    """An image, audio clip or the like behind placeholder tokens.

    ``offset`` is the position of its first placeholder token, ``content_id`` a digest of the media
    itself. Blocks before the offset stay shareable among sequences with other media.
    """

    offset: int
    content_id: str


class ExtraKeys:
    """Small ids for the extra keys of blocks, compared exactly and dropped with their last user.

    A block's extra key is ``(namespace of the sequence if it is the first block, media that start in
    it)``; later blocks inherit both through their parent. Id 0 is "nothing extra", the common case.
    """

    def __init__(self) -> None:
        """Start with no keys."""
        self._ids: dict[tuple[object, ...], int] = {}
        self._spare: list[int] = []
        self._keys: dict[int, tuple[object, ...]] = {}
        self._uses: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many distinct extra keys are in use."""
        return len(self._ids)

    def ids(self) -> set[int]:
        """Ids in use."""
        return set(self._uses)

    def take(self, key: tuple[object, ...]) -> int:
        """Id of ``key``, with one more user."""
        extra_id = self._ids.get(key)
        if extra_id is None:
            # in use and spare together are 1..n, so that ids never grow beyond the most keys at a time
            extra_id = self._spare.pop() if self._spare else len(self._ids) + 1
            self._ids[key], self._keys[extra_id], self._uses[extra_id] = extra_id, key, 0
        self._uses[extra_id] += 1
        return extra_id

    def exchange(self, old: Collection[tuple[object, ...]], new: Collection[tuple[object, ...]]) -> None:
        """Use the keys ``new`` in place of ``old``, or change nothing if that fails."""
        taken: list[int] = []
        try:
            for key in new:
                taken.append(self.take(key))
        except BaseException:
            for extra_id in taken:
                self.drop(extra_id)
            raise
        for key in old:
            self.drop(self.find(key))

    def find(self, key: tuple[object, ...]) -> int:
        """Id of ``key`` without using it, or -1 if nobody uses it."""
        return self._ids.get(key, -1)

    def key(self, extra_id: int) -> tuple[object, ...]:
        """The key of an id in use."""
        return self._keys[extra_id]

    def share(self, extra_id: int) -> None:
        """Count one more user of an id in use."""
        self._uses[extra_id] += 1

    def drop(self, extra_id: int) -> None:
        """Count one user less; the last one removes the key."""
        self._uses[extra_id] -= 1
        if not self._uses[extra_id]:
            del self._ids[self._keys.pop(extra_id)], self._uses[extra_id]
            if extra_id <= len(self._ids) + len(self._spare):  # else it was the greatest
                self._spare.append(extra_id)


def extra_keys_by_block(
    namespace: Namespace | None, media: Iterable[Media], num_tokens: int, block_size: int
) -> dict[int, tuple[object, ...]]:
    """Extra key of each block that has one, by block index. Raises ``PagedKVError`` for bad media.

    >>> extra_keys_by_block(None, [Media(17, "cat.png")], num_tokens=40, block_size=16)
    {1: (None, ((1, 'cat.png'),))}
    """
    if namespace is not None and not isinstance(namespace, Namespace):
        raise PagedKVError(f"namespace must be a Namespace, got {type(namespace).__name__}")
    first = None if namespace == Namespace() else namespace
    starts: dict[int, list[tuple[int, str]]] = {}
    for item in media:
        require_media(item, num_tokens)
        starts.setdefault(item.offset // block_size, []).append((item.offset % block_size, item.content_id))
    if first is not None:
        starts.setdefault(0, [])
    return {i: (first if i == 0 else None, tuple(sorted(set(items)))) for i, items in sorted(starts.items())}


def require_media(item: Media, num_tokens: int) -> None:
    """Refuse what is no ``Media``, or starts outside the first ``num_tokens`` positions."""
    if not isinstance(item, Media):
        raise PagedKVError(f"media must be Media(offset, content_id), got {item!r}")
    if type(item.offset) is not int or type(item.content_id) is not str:
        raise PagedKVError(f"media needs an int offset and a str content_id, got {item!r}")
    if not 0 <= item.offset < num_tokens:
        raise PagedKVError(
            f"media {item.content_id!r} starts at {item.offset}, outside the {num_tokens} tokens"
        )
