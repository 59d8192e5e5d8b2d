"""The native CPU backend: packs the arguments into one C struct and calls the library.

The way of a query: ``attend_at_once`` below (or ``attend``, where ``AttentionArguments`` were needed) ->
``pagedkv_attend`` in csrc/attend.cpp, which checks shapes, lengths and ids and shares out the work ->
csrc/attend_item.cpp, the loop over tiles of 64 tokens -> the three kernels of a tile: csrc/score_*.h,
csrc/softmax.h and csrc/value_*.h.

All of it computes in fp32, but int8 on CPUs with dot products of bytes (AVX-512 VNNI), where K and V never
become floats. There query and weights are carried in 15 bits each, with these errors on top of fp32's:

- the query is off by at most ``max|q| / 32512``, so a logit by at most
  ``e = scale * max|q| / 32512 * max_t sum_d |k[t, d]|``, and a weight by a factor within ``exp(+-2 e)``;
- the product of weight and v_scale of a token is off by at most ``W / 65534``, where W is the largest such
  product among the 64 tokens of a tile; 64 tokens times ``127 * W``, which is the largest ``weight * |v|`` of
  the tile, and weights that sum to 1 make at most ``64 / 65534 * max|v|``.

Together ``|out - exact| <= (exp(2 e) - 1 + 64 / 65534) * max|v|`` and ``|lse - exact| <= e``. The errors of
single roundings average out: measured are 2e-5 to 1e-4 of the largest output.
"""

import struct

import torch
from torch import Tensor

from pagedkv import native
from pagedkv.attention.arguments import MAX_WINDOW, AttentionArguments
from pagedkv.errors import PagedKVError

# As csrc/abi.h lays a call out: pointers, shape and strides of each tensor, numbers.
_LAYOUT = "82q2d"

_OK, _BAD_LENGTH, _BAD_BLOCK, _NO_MEMORY = range(4)

_QUERY_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Shape and strides of what is not given.
_NOTHING = {n: (-1,) * n + (0,) * n for n in (1, 3, 4)}


def unavailable() -> str | None:
    """Why the native library cannot be used on this machine; None if it can."""
    return native.reason()


def unsupported(args: AttentionArguments) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if args.q.device.type != "cpu":
        return f"runs on the CPU, the query is on {args.q.device}"
    if args.q.dtype not in _QUERY_DTYPES or args.k.dtype not in native.DTYPES:
        return f"computes in fp32: no {args.q.dtype} query on {args.k.dtype} keys"
    for name, x in (("k", args.k), ("v", args.v)):
        if x.stride(3) != 1 and x.shape[3] != 1:
            return f"needs the last dimension of {name} contiguous, its strides are {x.stride()}"
    return None


def attend(args: AttentionArguments) -> None:
    """Fill ``args.out``, ``args.lse`` and ``args.block_mass``. Lengths and block ids are checked on the way.

    Cost: one pass over the keys and values read, on up to ``torch.get_num_threads()`` threads, without the
    GIL: nobody may change the tables or lengths meanwhile. Results are the same for any number of threads and
    in any batch.
    """
    sinks = None if args.sinks is None else args.sinks.detach().to(torch.float32)
    status = _call(
        args.q, args.k, args.v, args.block_tables, args.seq_lens, args.scale, args.k_scale, args.v_scale,
        args.window, sinks, args.softcap, args.out, args.lse, args.block_mass,
    )  # fmt: skip
    if status != _OK:
        _refuse(args, status)


def attend_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
    block_mass: Tensor | None,
) -> bool:
    """Serve a call whose arguments nobody has checked, if they fit; the library compares the shapes.

    Looking at every tensor in Python takes longer than a short call itself. So where anything is unusual or
    wrong this only answers False, having written nothing, and ``AttentionArguments`` finds out what it is.
    """
    if not (q.is_cpu and k.is_cpu and v.is_cpu and block_tables.is_cpu and seq_lens.is_cpu and out.is_cpu):
        return False
    if out.dtype is not q.dtype or v.dtype is not k.dtype:
        return False
    if block_tables.dtype is not torch.int32 or seq_lens.dtype is not torch.int32:
        return False
    for option in (k_scale, v_scale, sinks, lse, block_mass):
        if option is not None and (option.dtype is not torch.float32 or not option.is_cpu):
            return False
    if (window is not None and not 1 <= window <= MAX_WINDOW) or (softcap is not None and not softcap > 0):
        return False
    try:
        status = _call(
            q, k, v, block_tables, seq_lens, scale, k_scale, v_scale, window, sinks, softcap, out, lse,
            block_mass,
        )  # fmt: skip
    except (PagedKVError, ValueError, KeyError, RuntimeError, struct.error):
        return False  # no library, dimensions, dtypes, tensors without memory
    return status == _OK


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
    block_mass: Tensor | None,
) -> int:
    """The status that the library returns. ``struct.error`` if dimensions are too many or too few."""
    try:
        call: native.Call = native._local.attend
    except AttributeError:
        call = native._local.attend = native.Call(_LAYOUT)
    dims = q.dim()
    address = call.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if block_mass is None else block_mass.data_ptr(),
        *_with_q_len(q, dims),
        *_measures(k, 4),
        *_measures(v, 4),
        *_measures(block_tables, 2),
        *_measures(seq_lens, 1),
        *_with_q_len(out, dims),
        *(_NOTHING[3] if k_scale is None else _measures(k_scale, 3)),
        *(_NOTHING[3] if v_scale is None else _measures(v_scale, 3)),
        *(_NOTHING[1] if sinks is None else _measures(sinks, 1)),
        *(_NOTHING[3] if lse is None else _with_q_len(lse, dims - 1, 3)),
        *(_NOTHING[4] if block_mass is None else _with_q_len(block_mass, dims)),
        _QUERY_DTYPES[q.dtype],
        native.DTYPES[k.dtype],
        window or 0,
        torch.get_num_threads(),
        native.isa(),
        scale,
        softcap or 0.0,
    )
    return int(native.library().pagedkv_attend(address))


def _measures(x: Tensor, dims: int) -> tuple[int, ...]:
    """Shape and strides, if there are that many dimensions."""
    shape = x.shape
    if len(shape) != dims:
        raise ValueError(f"{dims} dimensions, got {len(shape)}")
    return shape + x.stride()


def _with_q_len(x: Tensor, dims: int, full: int = 4) -> tuple[int, ...]:
    """The same of a query or an output, with a q_len of 1 where it has none."""
    shape, stride = x.shape, x.stride()
    if len(shape) != dims:
        raise ValueError(f"{dims} dimensions, got {len(shape)}")
    if dims == full:
        return shape + stride
    if dims != full - 1:
        raise ValueError(f"{full - 1} or {full} dimensions, got {dims}")
    return (shape[0], 1, *shape[1:], stride[0], 0, *stride[1:])


def _refuse(args: AttentionArguments, status: int) -> None:
    if status in (_BAD_LENGTH, _BAD_BLOCK):
        args.check_contents()  # words the error
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the partial results of this call")
    raise AssertionError(f"the native library answered {status} to a call that was checked")
