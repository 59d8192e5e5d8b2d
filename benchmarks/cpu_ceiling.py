"""The native CPU backend against the read ceiling: the same blocks, in the same order, on the same threads.

    python benchmarks/cpu_ceiling.py [--threads 1] [--gigabytes 4] [--dtypes bf16,fp32,int8] [--huge]

One layer of Llama 3 8B (32 query heads, 8 KV heads, dim 128), block size 16, blocks in random order. Each
call reads blocks that no call read within the last gigabytes. In a round the ceiling and the backend run one
after the other on blocks of their own, so that neither finds them in a cache; the table has medians over
rounds. With one thread its CPU time is measured, which leaves out what other processes took.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv import native
from pagedkv.attention import cpu_backend
from pagedkv.attention.arguments import AttentionArguments

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
CELLS = [(1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (32, 1024), (32, 8192)]


@dataclass
class Pool:
    """K and V of one layer, and how many of its blocks earlier calls have read."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    ids: Tensor
    used: int = 0

    def take(self, num_seqs: int, seq_len: int) -> Tensor:
        """Block tables of the blocks that were read longest ago."""
        blocks = seq_len // BLOCK_SIZE
        if self.used + num_seqs * blocks > len(self.ids):
            self.used = 0
        start, self.used = self.used, self.used + num_seqs * blocks
        return self.ids[start : self.used].view(num_seqs, blocks)


def make_pool(dtype: torch.dtype, gigabytes: float, huge: bool) -> Pool:
    block_bytes = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * dtype.itemsize
    num_blocks = int(gigabytes * 2**30 / block_bytes)
    tensors = []
    for _ in range(2):
        x = torch.empty(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
        if huge:
            native.advise_huge(x)
        part = torch.randn(1024, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        x.copy_(torch.zeros((), dtype=dtype))
        noise = (part * 40).clamp(-127, 127).to(dtype) if dtype == torch.int8 else part.to(dtype)
        for first in range(0, num_blocks, 1024):
            x[first : first + 1024] = noise[: num_blocks - first]
        tensors.append(x)
    scales = [None, None]
    if dtype == torch.int8:
        scales = [torch.full((num_blocks, NUM_KV_HEADS, BLOCK_SIZE), 0.02) for _ in range(2)]
    ids = torch.randperm(num_blocks, dtype=torch.int32)
    return Pool(tensors[0], tensors[1], scales[0], scales[1], ids)


def timed(call: Callable[[], object]) -> float:
    # one thread's CPU time leaves out what other processes took; several threads have only the wall
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def read(pool: Pool, tables: Tensor, lens: Tensor, threads: int) -> None:
    bytes_per_block = pool.k.stride(0) * pool.k.element_size()
    sizes = (bytes_per_block,) * 4
    fields = (pool.k.data_ptr(), pool.v.data_ptr(), tables.data_ptr(), lens.data_ptr(), len(lens), BLOCK_SIZE)
    call = native.Call("12q")
    native.library().pagedkv_read_blocks(call.pack(*fields, *sizes, tables.stride(0), threads))


def attend(pool: Pool, tables: Tensor, lens: Tensor, q: Tensor, out: Tensor) -> None:
    args = AttentionArguments(
        q, pool.k, pool.v, tables, lens, HEAD_DIM**-0.5, pool.k_scale, pool.v_scale,
        None, None, None, out, None, None, None,
    )  # fmt: skip
    cpu_backend.attend(args)


def measure(
    pool: Pool, num_seqs: int, seq_len: int, threads: int, seconds: float
) -> tuple[float, float, float]:
    """Medians: GB/s of the ceiling, GB/s of the backend, and their ratio within rounds."""
    q_dtype = torch.bfloat16 if pool.k.dtype == torch.int8 else pool.k.dtype
    q = torch.randn(num_seqs, 1, NUM_Q_HEADS, HEAD_DIM).to(q_dtype)
    out = torch.empty_like(q)
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
    size = num_seqs * seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * pool.k.element_size()
    inner = max(1, (64 << 20) // size)
    ceilings, speeds, ratios = [], [], []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(ratios) < 5:
        t_read = t_attend = 0.0
        for _ in range(inner):
            tables = pool.take(num_seqs, seq_len)
            t_read += timed(lambda tables=tables: read(pool, tables, lens, threads))  # type: ignore[misc]
            tables = pool.take(num_seqs, seq_len)
            t_attend += timed(lambda tables=tables: attend(pool, tables, lens, q, out))  # type: ignore[misc]
        ceilings.append(inner * size / t_read / 1e9)
        speeds.append(inner * size / t_attend / 1e9)
        ratios.append(t_read / t_attend)
    return statistics.median(ceilings), statistics.median(speeds), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="per cell")
    parser.add_argument("--dtypes", default="bf16,fp32,int8")
    parser.add_argument("--cells", default="")
    parser.add_argument("--huge", action="store_true", help="ask for huge pages under the pool")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cells = [tuple(map(int, c.split("x"))) for c in options.cells.split(",")] if options.cells else CELLS
    print(f"{options.threads} threads, huge pages {options.huge}, isa {native.ISAS[native.isa()]}")
    print(f"{'dtype':6} {'batch':>5} {'context':>8} {'ceiling':>9} {'backend':>9} {'ratio':>6} {'Mtok/s':>7}")
    for name in options.dtypes.split(","):
        pool = make_pool(DTYPES[name], options.gigabytes, options.huge)
        for num_seqs, seq_len in cells:
            ceiling, speed, ratio = measure(pool, num_seqs, seq_len, options.threads, options.seconds)
            tokens = speed * 1e9 / (2 * NUM_KV_HEADS * HEAD_DIM * DTYPES[name].itemsize) / 1e6
            print(f"{name:6} {num_seqs:5} {seq_len:8} {ceiling:9.1f} {speed:9.1f} {ratio:6.2f} {tokens:7.2f}")
        del pool


if __name__ == "__main__":
    main()
