"""What a compiled kernel is made of: its resources, and the instructions of its main loop.

The tools come with the triton wheel; no GPU is asked.
"""

import re
import subprocess
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# "        /*0a30*/              @!P0 LDGSTS.E.BYPASS.128 [R3+0x400], desc[UR4][R6.64] ;"
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"0x[0-9a-f]+")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


class Resources(NamedTuple):
    """registers: per thread. stack, local: bytes per thread, spills among them. shared: bytes, if static."""

    registers: int
    stack: int
    local: int
    shared: int


class Instruction(NamedTuple):
    """address: in bytes from the start of the kernel. target: where a branch goes, else None."""

    address: int
    mnemonic: str
    target: int | None


def resources(cubin: bytes) -> Resources:
    """Resources of the only kernel of a cubin, as the driver will see them."""
    found = dict(_RESOURCE.findall(_cuobjdump(cubin, "--dump-resource-usage")))
    return Resources(*(int(found[name]) for name in ("REG", "STACK", "LOCAL", "SHARED")))


def instructions(cubin: bytes) -> list[Instruction]:
    """The kernel, instruction by instruction."""
    listed = []
    for address, mnemonic, operands in _INSTRUCTION.findall(_cuobjdump(cubin, "-sass")):
        targets = _TARGET.findall(operands) if mnemonic.startswith("BRA") else []
        listed.append(Instruction(int(address, 16), mnemonic, int(targets[-1], 16) if targets else None))
    return listed


def main_loop(listed: list[Instruction]) -> Counter[str]:
    """Mnemonics of the innermost loop that multiplies on tensor cores; empty without one.

    A loop is what lies between a branch that goes back and its target.
    """
    at = {instruction.address: index for index, instruction in enumerate(listed)}
    loops = [
        listed[at[instruction.target] : end + 1]
        for end, instruction in enumerate(listed)
        if instruction.target is not None and instruction.target <= instruction.address
    ]
    multiplying = [loop for loop in loops if any("MMA" in instruction.mnemonic for instruction in loop)]
    return Counter(instruction.mnemonic for instruction in min(multiplying, key=len, default=[]))


def count(mnemonics: Counter[str], pattern: str) -> int:
    """Instructions whose mnemonic matches a regular expression from its start."""
    return sum(number for mnemonic, number in mnemonics.items() if re.match(pattern, mnemonic))


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_tools() / "cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _tools() -> Path:
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("triton is not installed")
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin"
