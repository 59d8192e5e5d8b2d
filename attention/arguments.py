"""The arguments of one attention call, checked at the door so that no backend has to."""

import math
import os
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from pagedkv.errors import BlockError, PagedKVError

QUERY_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# More query tokens per sequence are a prefill, which other kernels do better.
MAX_QUERY_LEN = 8

# No cache is longer, and the position of a query token less a window is still an int32.
MAX_WINDOW = 2**31 - 1 - MAX_QUERY_LEN

# On an accelerator a look at ids and lengths makes the host wait, so it is for hunting bugs only.
DEBUG = os.environ.get("PAGEDKV_DEBUG", "0") not in ("", "0")


# Not frozen, which would double the cost of construction; nobody assigns after it.
@dataclass(slots=True, eq=False)
class AttentionArguments:
    """What ``paged_attention`` was given. Construction checks all of it but the contents of the tables.

    It also brings the query and the outputs to one shape: a query of three dimensions gets a ``q_len`` of 1.

    q: [num_seqs, q_len, num_q_heads, head_dim], fp64, fp32, bf16 or fp16, any strides.
    k: [num_blocks, num_kv_heads, block_size, head_dim], any strides, a float dtype or int8.
    v: [num_blocks, num_kv_heads, block_size, v_head_dim], the dtype of ``k``.
    block_tables: [num_seqs, max_blocks] int32.
    seq_lens: [num_seqs] int32.
    k_scale, v_scale: [num_blocks, num_kv_heads, block_size] fp32 for int8, else None.
    scale: factor of the logits.
    window, softcap: None for off.
    sinks: [num_q_heads], a float dtype, or None.
    out: [num_seqs, q_len, num_q_heads, v_head_dim] in the dtype of ``q``, to be filled by the backend.
    lse: [num_seqs, q_len, num_q_heads] fp32, to be filled by the backend, or None.
    block_mass: [num_seqs, q_len, num_q_heads, max_blocks] fp32, to be filled by the backend, or None.
    plan: int32 of ``plan_splits``, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float
    k_scale: Tensor | None
    v_scale: Tensor | None
    window: int | None
    sinks: Tensor | None
    softcap: float | None
    out: Tensor
    lse: Tensor | None
    block_mass: Tensor | None
    plan: Tensor | None

    def __post_init__(self) -> None:
        """Raise ``PagedKVError``, with the numbers, for the first thing that does not fit."""
        self._check_query()
        self._check_cache()
        self._check_batch()
        self._check_scales()
        self._check_options()
        self._check_outputs()
        if self.q.dim() == 3:
            self._add_query_dimension()

    @property
    def q_len(self) -> int:
        """Query tokens per sequence, the last of which is the last token of the sequence."""
        return self.q.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head: query head h reads KV head ``h // group_size``."""
        return self.q.shape[2] // self.k.shape[1]

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self.k.shape[2]

    @property
    def is_latent(self) -> bool:
        """The values are the leading part of the keys (MLA), so that reading the keys reads both."""
        return self.v.data_ptr() == self.k.data_ptr() and self.v.stride() == self.k.stride()

    @property
    def looks_inside(self) -> bool:
        """Whether contents are checked: always on a CPU, where looking is cheap, else with PAGEDKV_DEBUG=1.

        On an accelerator the host would wait.
        """
        return DEBUG or self.q.device.type == "cpu"

    def spans(self) -> list[tuple[int, int]]:
        """Per sequence its length and the first position that is read. The host waits for ``seq_lens``."""
        lengths: list[int] = self.seq_lens.tolist()
        if self.window is None:
            return [(n, 0) for n in lengths]
        return [(n, max(0, n - self.q_len + 1 - self.window)) for n in lengths]

    def blind(self) -> Tensor:
        """[num_seqs, q_len] bool: the query token stands before its sequence and so sees nothing."""
        tokens = torch.arange(self.q_len, device=self.q.device)
        return tokens < self.q_len - self.seq_lens.unsqueeze(1)

    def check_contents(self) -> None:
        """Raise unless sequences fit their table row and the entries that will be read name blocks of ``k``.

        Done only where ``looks_inside``. Backends call this, unless they look for themselves.
        """
        if not self.looks_inside:
            return
        max_blocks, num_blocks = self.block_tables.shape[1], self.k.shape[0]
        lengths = self.seq_lens.long()
        limit = max_blocks * self.block_size
        for row in ((lengths < 0) | (lengths > limit)).nonzero()[:1, 0].tolist():
            raise PagedKVError(
                f"seq_lens[{row}] is {int(lengths[row])}, outside 0..{limit} "
                f"({max_blocks} blocks of {self.block_size} tokens)"
            )
        outside = self._is_read(lengths) & ((self.block_tables < 0) | (self.block_tables >= num_blocks))
        for row, column in outside.nonzero()[:1].tolist():
            block_id = int(self.block_tables[row, column])
            raise BlockError(f"block_tables[{row}, {column}] is {block_id}, outside 0..{num_blocks - 1}")

    def _is_read(self, lengths: Tensor) -> Tensor:
        """[num_seqs, max_blocks]: the block holds a token that its sequence reads."""
        starts = torch.arange(self.block_tables.shape[1], device=lengths.device) * self.block_size
        ends = lengths.unsqueeze(1)
        inside = starts < ends
        if self.window is None:
            return inside
        return inside & (starts + self.block_size > ends - self.q_len + 1 - self.window)

    def _check_query(self) -> None:
        dims = self.q.dim()
        if dims not in (3, 4):
            raise PagedKVError(
                f"q must be [num_seqs, num_q_heads, head_dim] or [num_seqs, q_len, num_q_heads, head_dim], "
                f"got {_shape(self.q)}"
            )
        if self.q.dtype not in QUERY_DTYPES:
            raise PagedKVError(f"q must be fp64, fp32, bf16 or fp16, got {self.q.dtype}")
        if dims == 4 and not 1 <= self.q.shape[1] <= MAX_QUERY_LEN:
            raise PagedKVError(f"q_len must be 1..{MAX_QUERY_LEN}, got q {_shape(self.q)}")

    def _check_cache(self) -> None:
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        if len(k) != 4:
            raise PagedKVError(f"k must be [num_blocks, num_kv_heads, block_size, head_dim], got {tuple(k)}")
        if len(v) != 4:
            raise PagedKVError(
                f"v must be [num_blocks, num_kv_heads, block_size, v_head_dim], got {tuple(v)}"
            )
        if v[:3] != k[:3] or q[-1] != k[3]:
            raise PagedKVError(
                f"q {tuple(q)}, k {tuple(k)} and v {tuple(v)} do not agree in num_blocks, "
                "num_kv_heads, block_size and head_dim"
            )
        if not (k[1] and k[2] and k[3] and v[3] and q[-2]):
            raise PagedKVError(f"an empty dimension in q {tuple(q)}, k {tuple(k)}, v {tuple(v)}")
        if q[-2] % k[1]:
            raise PagedKVError(f"{q[-2]} query heads are no multiple of {k[1]} KV heads")
        if self.v.dtype != self.k.dtype or not (self.k.is_floating_point() or self.k.dtype == torch.int8):
            raise PagedKVError(
                f"k and v must both be int8 or one float dtype, got {self.k.dtype} and {self.v.dtype}"
            )
        self._check_device("k", self.k)
        self._check_device("v", self.v)

    def _check_batch(self) -> None:
        num_seqs = self.q.shape[0]
        if self.block_tables.dim() != 2:
            raise PagedKVError(
                f"block_tables must be [num_seqs, max_blocks], got {_shape(self.block_tables)}"
            )
        self._check_tensor(
            "block_tables", self.block_tables, (num_seqs, self.block_tables.shape[1]), torch.int32
        )
        self._check_tensor("seq_lens", self.seq_lens, (num_seqs,), torch.int32)
        if self.plan is not None:
            self._check_plan(self.plan, 2 * num_seqs + 3)

    def _check_plan(self, plan: Tensor, least: int) -> None:
        if plan.dim() != 1 or len(plan) < least or plan.dtype != torch.int32 or not plan.is_contiguous():
            raise PagedKVError(
                f"plan must come from plan_splits for {self.q.shape[0]} sequences: contiguous int32 of at "
                f"least {least} entries, got {plan.dtype} {_shape(plan)}"
            )
        self._check_device("plan", plan)

    def _check_scales(self) -> None:
        is_int8 = self.k.dtype == torch.int8
        if (self.k_scale is not None) == is_int8 == (self.v_scale is not None):
            if self.k_scale is not None and self.v_scale is not None:
                self._check_tensor("k_scale", self.k_scale, self.k.shape[:3], torch.float32)
                self._check_tensor("v_scale", self.v_scale, self.k.shape[:3], torch.float32)
            return
        name = "v_scale" if (self.k_scale is not None) == is_int8 else "k_scale"
        given = "missing" if is_int8 else "given"
        raise PagedKVError(f"{name} is {given}, but k and v are {self.k.dtype}: scales belong to int8")

    def _check_options(self) -> None:
        if not math.isfinite(self.scale):
            raise PagedKVError(f"scale must be finite, got {self.scale}")
        if self.window is not None:
            self.window = checked_window(self.window)
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise PagedKVError(f"softcap must be positive and finite, got {self.softcap}")
        if self.sinks is not None:
            self._check_tensor("sinks", self.sinks, (self.q.shape[-2],), None)

    def _check_outputs(self) -> None:
        leading = self.q.shape[:-1]
        self._check_output("out", self.out, (*leading, self.v.shape[3]), self.q.dtype)
        if self.lse is not None:
            self._check_output("lse", self.lse, leading, torch.float32)
        if self.block_mass is not None:
            shape = (*leading, self.block_tables.shape[1])
            self._check_output("block_mass", self.block_mass, shape, torch.float32)

    def _check_output(self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._check_tensor(name, x, shape, dtype)
        steps = x.stride()
        if 0 in steps and any(size > 1 and step == 0 for size, step in zip(shape, steps, strict=True)):
            raise PagedKVError(f"{name} {_shape(x)} is expanded (strides {steps}): its entries share memory")

    def _check_tensor(self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        fits = x.dtype == dtype if dtype is not None else x.is_floating_point()
        if x.shape != shape or not fits:
            wanted = dtype if dtype is not None else "floats"
            raise PagedKVError(f"{name} must be {wanted} {tuple(shape)}, got {x.dtype} {_shape(x)}")
        self._check_device(name, x)

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device != self.q.device:
            raise PagedKVError(f"{name} is on {x.device}, q on {self.q.device}")

    def _add_query_dimension(self) -> None:
        self.q, self.out = self.q.unsqueeze(1), self.out.unsqueeze(1)
        if self.lse is not None:
            self.lse = self.lse.unsqueeze(1)
        if self.block_mass is not None:
            self.block_mass = self.block_mass.unsqueeze(1)


def checked_window(window: object) -> int:
    """The window as an int, ``MAX_WINDOW`` at most; ``PagedKVError`` unless a whole number of at least 1."""
    # numpy integers are Integral too; True is a mistake, not 1
    if not isinstance(window, Integral) or isinstance(window, bool) or int(window) < 1:
        raise PagedKVError(
            f"window must be an integer of at least 1 (the token of this step), got {window!r}"
        )
    return min(int(window), MAX_WINDOW)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
