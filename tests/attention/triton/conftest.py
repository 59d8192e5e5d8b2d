"""These tests run in the interpreter, which must be asked for before triton is imported: see the launcher."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":

    @pytest.fixture(autouse=True)
    def _poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
        """Partial results start as NaN: whatever is read without having been written shows."""
        from pagedkv.attention.triton_backend import launch

        new_partials = launch.new_partials

        def poisoned(*args: object) -> launch.Partials:
            partials = new_partials(*args)  # type: ignore[arg-type]
            for x in partials:
                x.fill_(float("nan"))
            return partials

        monkeypatch.setattr(launch, "new_partials", poisoned)
