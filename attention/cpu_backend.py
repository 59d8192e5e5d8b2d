"""The native CPU backend: hands the arguments to the library in one C struct.

The way of a query: ``attend_at_once`` below and csrc/attend_tensors.cpp (or ``attend``, where
``AttentionArguments`` were needed) -> ``pagedkv_attend`` in csrc/attend.cpp, which checks shapes, lengths
and ids and shares out the work -> csrc/attend_item.cpp, the loop over tiles of 64 tokens -> the three kernels
of a tile: csrc/score_*.h, csrc/softmax.h and csrc/value_*.h.

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
from torch import Tensor

from pagedkv import native
from pagedkv.attention.arguments import AttentionArguments

# As csrc/abi.h lays a call out: pointers, shape and strides of each tensor, numbers.
_LAYOUT = "82q2d"

_OK, _BAD_LENGTH, _BAD_BLOCK, _NO_MEMORY = range(4)

_QUERY_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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
    tensors = (
        args.q, args.k, args.v, args.k_scale, args.v_scale, args.block_tables, args.seq_lens, sinks, args.out,
        args.lse, args.block_mass,
    )  # fmt: skip
    try:
        call: native.Call = native._local.attend
    except AttributeError:
        call = native._local.attend = native.Call(_LAYOUT)
    address = call.pack(
        *(0 if x is None else x.data_ptr() for x in tensors),
        *_measures(args.q),
        *_measures(args.k),
        *_measures(args.v),
        *_measures(args.block_tables),
        *_measures(args.seq_lens),
        *_measures(args.out),
        *_measures(args.k_scale, 3),
        *_measures(args.v_scale, 3),
        *_measures(sinks, 1),
        *_measures(args.lse, 3),
        *_measures(args.block_mass, 4),
        _QUERY_DTYPES[args.q.dtype],
        native.DTYPES[args.k.dtype],
        args.window or 0,
        torch.get_num_threads(),
        native.isa(),
        args.scale,
        args.softcap or 0.0,
    )
    status = int(native.library().pagedkv_attend(address))
    if status != _OK:
        _refuse(args, status)


def attend_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
    block_mass: Tensor | None,
) -> bool:
    """Serve a call whose arguments nobody has checked, if they fit; the library looks at them itself.

    Looking at every tensor in Python takes longer than a short call. So where anything is unusual or wrong
    this only answers False, having written nothing, and ``AttentionArguments`` finds out what it is. A scale
    of None is ``1 / sqrt(head_dim)``.
    """
    function = native.attend()
    if function is None:
        return False
    status = function(
        q, k, v, block_tables, seq_lens, scale, k_scale, v_scale, window, sinks, softcap, out, lse,
        block_mass, torch.get_num_threads(), native.isa(),
    )  # fmt: skip
    return status == _OK


def _measures(x: Tensor | None, dims: int = 0) -> tuple[int, ...]:
    """Shape and strides; of what is not given as csrc/abi.h has them."""
    return (-1,) * dims + (0,) * dims if x is None else x.shape + x.stride()


def _refuse(args: AttentionArguments, status: int) -> None:
    if status in (_BAD_LENGTH, _BAD_BLOCK):
        args.check_contents()  # words the error
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the partial results of this call")
    raise AssertionError(f"the native library answered {status} to a call that was checked")
