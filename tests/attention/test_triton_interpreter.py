"""Run the tests of the Triton kernels in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "triton"
SECONDS = 900


@pytest.mark.parametrize("module", sorted(path.name for path in INTERPRETED.glob("test_triton_*.py")))
def test_triton_kernels_in_the_interpreter(module: str) -> None:
    """The interpreter is chosen when triton is imported, and a stray pointer there ends the process."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-Im",
        "pytest",
        "--import-mode=importlib",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
    ]
    result = subprocess.run(
        [*command, str(INTERPRETED / module)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=INTERPRETED,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout
