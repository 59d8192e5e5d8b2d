"""The kernels as compiled for A100, H200 and B200: nothing spills, and no loop is slower than the memory.

``pytest -s`` prints the table. No GPU is asked; what only a GPU can tell (stalls, races, speed) is not here.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

import pagedkv

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="compiled in a run without interpreter"
    ),
]

MAX_REGISTERS = 168  # three programs of 128 threads on a multiprocessor with 65536
MAX_REGISTERS_LATENT = 255  # two: a latent row is four times as wide, so that two have as much in flight
MAX_SHARED = 99 * 1024  # what one program may have on every chip since sm_80
MAX_ISSUE = {80: 0.45, 90: 0.45, 100: 0.6}


class Chip(NamedTuple):
    """bandwidth: bytes per second. flops: dense bf16 per second, flops_per_clock: of one multiprocessor."""

    name: str
    bandwidth: float
    num_sms: int
    flops: float
    flops_per_clock: int

    @property
    def bytes_per_clock(self) -> float:
        """Bytes that the memory gives one multiprocessor per clock, at the clock behind the rated flops."""
        clock = self.flops / (self.num_sms * self.flops_per_clock)
        return self.bandwidth / (self.num_sms * clock)


# Bandwidth and peak rates from NVIDIA's data sheets of the SXM modules, multiprocessors and flops per clock
# from its architecture papers. They give 13.4, 19.9 and 29.1 bytes per clock.
CHIPS = {
    80: Chip("A100 80GB", 2.039e12, 108, 312e12, 2048),
    90: Chip("H200", 4.8e12, 132, 989.4e12, 4096),
    100: Chip("B200", 8.0e12, 148, 2250e12, 8192),
}


class Kernel(NamedTuple):
    """One kernel for one architecture, as ``compile_kernels`` reports it."""

    name: str
    architecture: int
    registers: int
    stack: int
    shared: int
    num_warps: int
    value_bytes: int
    scale_bytes: int
    kernel: dict[str, int]
    loop: dict[str, int]

    @property
    def id(self) -> tuple[str, int]:
        return self.name, self.architecture

    @property
    def is_attention(self) -> bool:
        return self.value_bytes > 0

    @property
    def is_int8(self) -> bool:
        return self.name.startswith("int8")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def issue(self) -> float:
        """Share of its issue slots that a multiprocessor needs while the memory delivers at full speed.

        A multiprocessor issues four instructions per clock: a step takes ``instructions * warps / 4`` clocks,
        and its tile takes ``bytes / bytes_per_clock`` clocks to arrive.
        """
        clocks = sum(self.loop.values()) * self.num_warps / 4
        tile_bytes = self.value_bytes + self.scale_bytes
        return clocks / (tile_bytes / CHIPS[self.architecture].bytes_per_clock)


def count(mnemonics: dict[str, int], pattern: str) -> int:
    return sum(number for mnemonic, number in mnemonics.items() if re.match(pattern, mnemonic))


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """Every kernel for every architecture, compiled in a process of its own."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    package = str(Path(next(iter(pagedkv.__path__))).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    # what the kernels are written for; without a word from us Triton warns that its default will change
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = [Kernel(**record) for record in json.loads(done.stdout)]
    print_table(found)
    return found


def print_table(kernels: Iterable[Kernel]) -> None:
    print(f"\nTriton {importlib.metadata.version('triton')}")
    print(f"{'kernel':<22} {'chip':<10} registers  stack  shared    loop  issue")
    for kernel in kernels:
        row = f"{kernel.name:<22} {CHIPS[kernel.architecture].name:<10}"
        row += f" {kernel.registers:>9}  {kernel.stack:>5}  {kernel.shared:>6}"
        if kernel.is_attention:
            row += f"  {sum(kernel.loop.values()):>6}  {kernel.issue:>5.2f}"
        print(row)


def test_nothing_spills(kernels: list[Kernel]) -> None:
    """No stack and no local memory in any kernel."""
    assert {kernel.id: kernel.stack for kernel in kernels if kernel.stack} == {}


def test_registers_leave_room_for_programs_in_flight(kernels: list[Kernel]) -> None:
    """Three programs in flight hide the latency of the memory four times over; two of a latent do."""
    too_many = {}
    for kernel in kernels:
        limit = MAX_REGISTERS_LATENT if kernel.name.startswith("latent") else MAX_REGISTERS
        if kernel.registers > limit:
            too_many[kernel.id] = kernel.registers
    assert too_many == {}


def test_shared_memory_fits_every_chip(kernels: list[Kernel]) -> None:
    """Static and dynamic together."""
    assert {kernel.id: kernel.shared for kernel in kernels if kernel.shared > MAX_SHARED} == {}


def test_keys_and_values_are_loaded_sixteen_bytes_at_a_time(kernels: list[Kernel]) -> None:
    """The wide loads of the loop account for every byte of the tile."""
    narrow = {}
    for kernel in filter(lambda kernel: kernel.is_attention, kernels):
        wide = 16 * kernel.num_threads * count(kernel.loop, r"(LDGSTS|LDG)\..*\b128\b")
        if wide < kernel.value_bytes:
            narrow[kernel.id] = (wide, kernel.value_bytes)
    assert narrow == {}


def test_merge_and_write_load_sixteen_bytes_at_a_time(kernels: list[Kernel]) -> None:
    """Partial results and new vectors."""
    others = [kernel for kernel in kernels if kernel.name.startswith(("merge", "write"))]
    assert len(others) == 4 * len(CHIPS)
    assert [kernel.id for kernel in others if not count(kernel.kernel, r"LDG\..*\b128\b")] == []


def test_products_run_on_tensor_cores(kernels: list[Kernel]) -> None:
    """HMMA for 16-bit floats; IMMA, and nothing else, for int8."""
    wrong = {}
    for kernel in filter(lambda kernel: kernel.is_attention, kernels):
        products = {mnemonic.split(".")[0] for mnemonic in kernel.loop if "MMA" in mnemonic}
        if products != ({"IMMA"} if kernel.is_int8 else {"HMMA"}):
            wrong[kernel.id] = products
    assert wrong == {}


def test_keys_and_values_are_neither_converted_nor_read_by_bytes(kernels: list[Kernel]) -> None:
    """Integers become floats as logits and outputs only, a quarter of the numbers of a tile at the most."""
    slow = {}
    for kernel in filter(lambda kernel: kernel.is_attention, kernels):
        by_bytes = count(kernel.loop, r"LDS\.[US](8|16)")
        of_bytes = count(kernel.loop, r"I2F.*\.[US](8|16)")
        conversions = count(kernel.loop, "I2F")
        allowed = kernel.value_bytes / kernel.num_threads / 4 if kernel.is_int8 else 0
        if by_bytes or of_bytes or conversions > allowed:
            slow[kernel.id] = (by_bytes, of_bytes, conversions)
    assert slow == {}


def test_the_loop_leaves_most_issue_slots_free(kernels: list[Kernel]) -> None:
    """A necessary condition of memory speed, not a sufficient one."""
    attention = [kernel for kernel in kernels if kernel.is_attention]
    assert len(attention) == 11 * len(CHIPS)
    assert {k.id: round(k.issue, 2) for k in attention if k.issue > MAX_ISSUE[k.architecture]} == {}


def test_the_int8_loop_needs_no_more_issue_slots_per_token_than_that_of_bf16(kernels: list[Kernel]) -> None:
    """Half the bytes per token pay only if the instructions per token do not grow."""
    clocks = {
        kernel.id: sum(kernel.loop.values()) / (kernel.value_bytes / (256 if kernel.is_int8 else 512))
        for kernel in kernels
        if kernel.name in ("bf16 d128", "int8 d128")
    }
    for architecture in CHIPS:
        assert clocks["int8 d128", architecture] < clocks["bf16 d128", architecture]
