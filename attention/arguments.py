"""The arguments of one attention call, checked at the door so that no backend has to."""

import math
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from pagedkv.errors import BlockError, PagedKVError

QUERY_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """What ``paged_attention`` was given, with its defaults filled in. Construction checks all of it.

    q: [num_seqs, num_q_heads, head_dim], fp64, fp32, bf16 or fp16.
    k: [num_blocks, num_kv_heads, block_size, head_dim], any strides, a float dtype or int8.
    v: [num_blocks, num_kv_heads, block_size, v_head_dim], the dtype of ``k``.
    block_tables: [num_seqs, max_blocks] int32.
    seq_lens: [num_seqs] int32.
    k_scale, v_scale: [num_blocks, num_kv_heads, block_size] fp32 for int8, else None.
    scale: factor of the logits.
    window, softcap: None for off.
    sinks: [num_q_heads], a float dtype, or None.
    out: [num_seqs, num_q_heads, v_head_dim] in the dtype of ``q``, to be filled by the backend.
    lse: [num_seqs, num_q_heads] fp32, to be filled by the backend, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor | None

    def __post_init__(self) -> None:
        """Raise ``PagedKVError``, with the numbers, for the first thing that does not fit."""
        self._check_cache()
        self._check_batch()
        self._check_scales()
        self._check_options()
        self._check_outputs()
        if self.q.device.type == "cpu":
            self._check_contents()

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head: query head h reads KV head ``h // group_size``."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self.k.shape[2]

    def spans(self) -> list[tuple[int, int]]:
        """Per sequence its length and the first position that is read. The host waits for ``seq_lens``."""
        lengths: list[int] = self.seq_lens.tolist()
        return [(n, max(0, n - self.window) if self.window is not None else 0) for n in lengths]

    def _check_cache(self) -> None:
        _check_dim("q", self.q, "[num_seqs, num_q_heads, head_dim]")
        _check_dim("k", self.k, "[num_blocks, num_kv_heads, block_size, head_dim]")
        _check_dim("v", self.v, "[num_blocks, num_kv_heads, block_size, v_head_dim]")
        if self.v.shape[:3] != self.k.shape[:3] or self.q.shape[2] != self.k.shape[3]:
            raise PagedKVError(
                f"q {_shape(self.q)}, k {_shape(self.k)} and v {_shape(self.v)} do not agree in num_blocks, "
                "num_kv_heads, block_size and head_dim"
            )
        if min(self.k.shape[1:]) < 1 or min(self.q.shape[1:]) < 1 or self.v.shape[3] < 1:
            raise PagedKVError(
                f"an empty dimension in q {_shape(self.q)}, k {_shape(self.k)}, v {_shape(self.v)}"
            )
        if self.q.shape[1] % self.k.shape[1]:
            raise PagedKVError(f"{self.q.shape[1]} query heads are no multiple of {self.k.shape[1]} KV heads")
        if self.q.dtype not in QUERY_DTYPES:
            raise PagedKVError(f"q must be fp64, fp32, bf16 or fp16, got {self.q.dtype}")
        if self.v.dtype != self.k.dtype or not (self.k.is_floating_point() or self.k.dtype == torch.int8):
            raise PagedKVError(
                f"k and v must both be int8 or one float dtype, got {self.k.dtype} and {self.v.dtype}"
            )
        self._check_devices("k", self.k)
        self._check_devices("v", self.v)

    def _check_batch(self) -> None:
        num_seqs = self.q.shape[0]
        _check_dim("block_tables", self.block_tables, "[num_seqs, max_blocks]")
        self._check_tensor(
            "block_tables", self.block_tables, (num_seqs, self.block_tables.shape[1]), torch.int32
        )
        self._check_tensor("seq_lens", self.seq_lens, (num_seqs,), torch.int32)

    def _check_scales(self) -> None:
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if (scale is None) == (self.k.dtype == torch.int8):
                given = "missing" if scale is None else "given"
                raise PagedKVError(
                    f"{name} is {given}, but k and v are {self.k.dtype}: scales belong to int8"
                )
            if scale is not None:
                self._check_tensor(name, scale, tuple(self.k.shape[:3]), torch.float32)

    def _check_options(self) -> None:
        if not math.isfinite(self.scale):
            raise PagedKVError(f"scale must be finite, got {self.scale}")
        if self.window is not None and not _is_positive_int(self.window):
            raise PagedKVError(
                f"window must be an integer of at least 1 (the token of this step), got {self.window!r}"
            )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise PagedKVError(f"softcap must be positive and finite, got {self.softcap}")
        if self.sinks is not None:
            self._check_tensor("sinks", self.sinks, (self.q.shape[1],), None)

    def _check_outputs(self) -> None:
        shape = (*self.q.shape[:2], self.v.shape[3])
        self._check_tensor("out", self.out, shape, self.q.dtype)
        if self.lse is not None:
            self._check_tensor("lse", self.lse, tuple(self.q.shape[:2]), torch.float32)

    def _check_contents(self) -> None:
        """Sequences fit their row of the table, and the entries that will be read name blocks of ``k``."""
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
        return inside if self.window is None else inside & (starts + self.block_size > ends - self.window)

    def _check_tensor(self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        fits = x.dtype == dtype if dtype is not None else x.is_floating_point()
        if x.shape != shape or not fits:
            wanted = dtype if dtype is not None else "floats"
            raise PagedKVError(f"{name} must be {wanted} {shape}, got {x.dtype} {_shape(x)}")
        self._check_devices(name, x)

    def _check_devices(self, name: str, x: Tensor) -> None:
        if x.device != self.q.device:
            raise PagedKVError(f"{name} is on {x.device}, q on {self.q.device}")


def _check_dim(name: str, x: Tensor, wanted: str) -> None:
    if x.dim() != wanted.count(",") + 1:
        raise PagedKVError(f"{name} must be {wanted}, got {_shape(x)}")


def _is_positive_int(value: object) -> bool:
    # numpy integers are Integral too; True is a mistake, not 1
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
