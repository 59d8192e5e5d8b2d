"""Benchmarks print what they measured besides seconds."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line per benchmark: median seconds and the figures derived from it."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    terminalreporter.section(f"figures ({platform.machine()}, {versions})")
    for bench in session.benchmarks:
        figures = ", ".join(f"{key} {value:,.1f}" for key, value in bench.extra_info.items())
        terminalreporter.write_line(f"{bench.name}: median {bench.stats.median:.3f} s; {figures}")
