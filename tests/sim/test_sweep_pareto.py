"""Which points of a sweep no other beats."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.sim.sweep.sweep_columns import FIGURES
from pagedkv.sim.sweep.sweep_pareto import pareto


class TestPareto:
    def test_by_hand(self) -> None:
        """Less memory and more tokens: (3, 8) is beaten by (2, 9); equals stay both."""
        points = [(1, 5.0), (3, 8.0), (2, 9.0), (2, 9.0), (4, 9.0), (5, 9.5)]
        rows: Any = [{"pool_bytes": m, "output_tokens_per_s": t, "error": None} for m, t in points]
        found = pareto(rows, "pool_bytes", "output_tokens_per_s")
        assert [(row["pool_bytes"], row["output_tokens_per_s"]) for row in found] == [
            (1, 5.0),
            (2, 9.0),
            (2, 9.0),
            (5, 9.5),
        ]

    @given(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30),
        st.sampled_from(["itl_p99_s", "output_tokens_per_s"]),
        st.sampled_from(["pool_bytes", "token_hit_rate"]),
    )
    def test_exactly_those_that_no_other_beats(self, points: list[tuple[int, int]], y: str, x: str) -> None:
        """Against the definition, for figures of which more or less is better."""
        better = {column.name: column.better for column in FIGURES}
        rows: Any = [{x: a, y: b, "error": None} for a, b in points]

        def beats(one: Any, other: Any) -> bool:
            gains = [better[name] * (one[name] - other[name]) for name in (x, y)]
            return bool(min(gains) >= 0 and max(gains) > 0)

        expected = [row for row in rows if not any(beats(one, row) for one in rows)]
        found = pareto(rows, x, y) if rows else []
        assert sorted(map(id, found)) == sorted(map(id, expected))

    def test_refuses_what_is_no_figure(self) -> None:
        """And one figure against itself."""
        with pytest.raises(PagedKVError, match="no figure 'gpu'"):
            pareto([], "gpu", "pool_bytes")
        with pytest.raises(PagedKVError, match="pool_bytes twice"):
            pareto([], "pool_bytes", "pool_bytes")
