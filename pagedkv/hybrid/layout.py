"""How the layers of a model are split into groups whose blocks all fit one pool."""

from collections.abc import Sequence

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import SpecError
from pagedkv.hybrid.group import CacheGroup
from pagedkv.layer_spec import LayerSpec, whole_number
from pagedkv.spec import KVCacheSpec


def groups_for(spec: KVCacheSpec, sinks: int = 0) -> tuple[CacheGroup, ...]:
    """Split the layers of a model into groups of (nearly) equal bytes per block.

    Layers that store the same and see the same are a class. The class with the fewest bytes becomes one
    group; every other one is split evenly into as few groups as have no more bytes than that, so that
    all of them can share one pool of equal blocks. Where it does not come out even, some groups have a
    layer less than others and leave that part of their blocks unused; `bytes_per_block` tells what a
    block takes. Window groups get ``sinks`` sink tokens.

    Raises ``SpecError`` if a single layer of one class has more bytes than all of another together.

    Gemma-3 27B has 62 layers, every sixth of them global:

    >>> local, full = LayerSpec(16, 128, window=1024), LayerSpec(16, 128)
    >>> spec = KVCacheSpec(tuple(full if i % 6 == 5 else local for i in range(62)))
    >>> groups = groups_for(spec)
    >>> [(group.name, len(group.layers)) for group in groups]  # doctest: +NORMALIZE_WHITESPACE
    [('window1024/0', 9), ('window1024/1', 9), ('window1024/2', 9), ('window1024/3', 9),
     ('window1024/4', 8), ('window1024/5', 8), ('full', 10)]
    >>> groups[-1].layers, bytes_per_block(spec, groups)
    ((5, 11, 17, 23, 29, 35, 41, 47, 53, 59), 1310720)
    """
    sinks = whole_number("sinks", sinks, 0)
    layer_bytes = {layer: layer.bytes_per_token(spec.dtype) for layer in spec.groups}
    room = min(layer_bytes[layer] * len(members) for layer, members in spec.groups.items())
    groups: list[CacheGroup] = []
    taken: dict[str, int] = {}
    for layer, members in spec.groups.items():
        if layer_bytes[layer] > room:
            raise SpecError(
                f"no equal blocks: one layer of {layer_bytes[layer]} bytes per token is larger than "
                f"a whole class of layers with {room}"
            )
        count = div_ceil(len(members), room // layer_bytes[layer])
        for part in range(count):
            base = _name(layer)
            number = taken.get(base, 0)
            taken[base] = number + 1
            groups.append(
                CacheGroup(
                    f"{base}/{number}", _share(members, part, count), layer.window, _sinks(layer, sinks)
                )
            )
    alone = {base for base, number in taken.items() if number == 1}
    return tuple(
        CacheGroup(base, group.layers, group.window, group.sinks)
        if (base := group.name.rpartition("/")[0]) in alone
        else group
        for group in groups
    )


def bytes_per_block(spec: KVCacheSpec, groups: Sequence[CacheGroup]) -> int:
    """Bytes of one block of the shared pool: of the group whose layers take most, scales included.

    >>> local, full = LayerSpec(8, 64, window=128), LayerSpec(8, 64)
    >>> spec = KVCacheSpec((local, full) * 12)
    >>> bytes_per_block(spec, groups_for(spec)) == 12 * 16 * 2048
    True
    """
    return spec.block_size * max(
        sum(spec.bytes_per_token_layer(layer) for layer in group.layers) for group in groups
    )


def _name(layer: LayerSpec) -> str:
    return "full" if layer.window is None else f"window{layer.window}"


def _sinks(layer: LayerSpec, sinks: int) -> int:
    return 0 if layer.window is None else sinks


def _share(members: tuple[int, ...], part: int, count: int) -> tuple[int, ...]:
    """Part ``part`` of ``count`` parts of consecutive members, the first ones a member longer."""
    size, longer = divmod(len(members), count)
    start = part * size + min(part, longer)
    return members[start : start + size + (part < longer)]
