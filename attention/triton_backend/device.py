"""What runs here: a CUDA device, or Triton's interpreter on CPU tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pagedkv.attention.triton_backend.numerics import INTERPRETED


def unavailable() -> str | None:
    """Why no call can be served in this process, or None."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "it needs a CUDA device (to test it without one, set TRITON_INTERPRET=1 before triton is imported)"


def device_mismatch(x: Tensor) -> str | None:
    """Why a kernel cannot run on this tensor, or None."""
    wanted = "cpu" if INTERPRETED else "cuda"
    if x.device.type == wanted:
        return None
    return f"tensors on {x.device}, {'the interpreter needs cpu' if INTERPRETED else 'Triton needs cuda'}"


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device. The properties are cached by torch."""
    return torch.cuda.get_device_properties(device).multi_processor_count
