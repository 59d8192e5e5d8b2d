"""What the Triton backend does not do, in words."""

import torch

from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.triton_backend.device import device_mismatch
from pagedkv.attention.triton_backend.geometry import is_mla, operand_dtype
from pagedkv.attention.triton_backend.launch import num_items
from pagedkv.attention.triton_backend.plan import default_target

# The width of a tile of keys that still fits beside its values without spills.
MAX_HEAD_DIM = 256
MAX_LATENT, MAX_ROPE = 512, 64

# Query, latent and rope of one step in fp32, as compiled; some chips have 99 KB.
FP32_LATENT_BYTES = 112 * 1024

# Dimensions 1 and 2 of a CUDA grid.
_MAX_GRID = 65535

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


def unsupported(args: AttentionArguments) -> str | None:
    """What this call asks for and the backend cannot do, with its numbers; None if it serves the call.

    Cost: a few comparisons; the device is not asked.
    """
    return device_mismatch(args.q) or _unsupported_dtype(args) or _unsupported_shape(args)


def _unsupported_dtype(args: AttentionArguments) -> str | None:
    if args.q.dtype == torch.float64:
        return "a query in fp64"
    if args.k.dtype not in _CACHE_DTYPES:
        return f"a cache in {args.k.dtype}"
    return _unsupported_device(args) if args.q.is_cuda else None


def _unsupported_device(args: AttentionArguments) -> str | None:
    device = torch.cuda.get_device_properties(args.q.device)
    capability = f"compute capability {device.major}.{device.minor}"
    if device.major < 8:
        return f"{capability}, 8.0 is needed"
    if args.k.dtype == torch.float8_e4m3fn and (device.major, device.minor) < (8, 9):
        return f"a cache in fp8-e4m3 on {capability}, 8.9 is needed"
    # older torch does not tell; then the launch would
    shared = getattr(device, "shared_memory_per_block_optin", FP32_LATENT_BYTES)
    if is_mla(args) and operand_dtype(args) == torch.float32 and shared < FP32_LATENT_BYTES:
        return f"an fp32 latent with {shared} bytes of shared memory, {FP32_LATENT_BYTES} are needed"
    return None


def _unsupported_shape(args: AttentionArguments) -> str | None:
    head_dim, v_head_dim = args.k.shape[3], args.v.shape[3]
    if is_mla(args):
        if v_head_dim > MAX_LATENT or head_dim - v_head_dim > MAX_ROPE:
            return f"a latent of {v_head_dim} + {head_dim - v_head_dim}, at most {MAX_LATENT} + {MAX_ROPE}"
    elif max(head_dim, v_head_dim) > MAX_HEAD_DIM:
        return f"head_dim {head_dim} with v_head_dim {v_head_dim}, at most {MAX_HEAD_DIM}"
    num_seqs = len(args.q)
    if args.plan is not None:
        items = num_items(args, args.plan)
    else:
        items = num_seqs + default_target(args.q.device, args.k.shape[1])
    if max(items, num_seqs) > _MAX_GRID:
        return f"{items} work items, at most {_MAX_GRID}"
    return None
