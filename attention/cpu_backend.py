"""The native CPU backend: packs the arguments into one C struct and calls the library.

The way of a query: ``attend`` below -> ``pagedkv_attend`` in csrc/attend.cpp, which checks lengths and ids
and shares out the work -> csrc/attend_item.cpp, the loop over tiles of 64 tokens -> the three kernels of a
tile: csrc/score_*.h, csrc/softmax.h and csrc/value_*.h.

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

import torch

from pagedkv import native
from pagedkv.attention.arguments import AttentionArguments

_LAYOUT = "11q9q16q14q5q2d"

_OK, _BAD_LENGTH, _BAD_BLOCK, _NO_MEMORY, _NO_KERNEL = range(5)

_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    q, k, v, out, lse, mass = args.q, args.k, args.v, args.out, args.lse, args.block_mass
    k_scale, v_scale, sinks = args.k_scale, args.v_scale, args.sinks
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32).contiguous()
    try:
        call: native.Call = native._local.attend
    except AttributeError:
        call = native._local.attend = native.Call(_LAYOUT)
    num_seqs, q_len, num_q_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, v_head_dim = v.shape
    address = call.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        args.block_tables.data_ptr(),
        args.seq_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if mass is None else mass.data_ptr(),
        num_seqs,
        q_len,
        num_q_heads,
        head_dim,
        num_blocks,
        num_kv_heads,
        block_size,
        v_head_dim,
        args.block_tables.shape[1],
        *q.stride(),
        *k.stride()[:3],
        *v.stride()[:3],
        *(k_scale.stride() if k_scale is not None else (0, 0, 0)),
        *(v_scale.stride() if v_scale is not None else (0, 0, 0)),
        *args.block_tables.stride(),
        *args.seq_lens.stride(),
        *out.stride(),
        *(lse.stride() if lse is not None else (0, 0, 0)),
        *(mass.stride() if mass is not None else (0, 0, 0, 0)),
        native.DTYPES[q.dtype],
        native.DTYPES[k.dtype],
        args.window or 0,
        torch.get_num_threads(),
        native.isa(),
        args.scale,
        args.softcap or 0.0,
    )
    status = native.library().pagedkv_attend(address)
    if status != _OK:
        _refuse(args, status)


def _refuse(args: AttentionArguments, status: int) -> None:
    if status in (_BAD_LENGTH, _BAD_BLOCK):
        args.check_contents()  # words the error
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the partial results of this call")
    raise AssertionError(f"the native library answered {status} to a call that was checked")
