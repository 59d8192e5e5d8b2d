"""Grids: combinations in order, from the command line and from files, and every mistake refused."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.sim.sweep.grid import MOST_POINTS, Grid, Setting, read_grid_file
from pagedkv.sim.sweep.sweep_options import arguments_of, check_axes, parse_point, point_options


def written(folder: Path, text: str, name: str = "grid.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


class TestGrid:
    def test_the_last_axis_varies_fastest(self) -> None:
        """Four points of two axes, in order."""
        grid = Grid({"gpu": ["h100", "b200"], "block-size": ["16", "32"]})
        assert [tuple(point.values()) for point in grid] == [
            ("h100", "16"),
            ("h100", "32"),
            ("b200", "16"),
            ("b200", "32"),
        ]
        assert len(grid) == 4

    def test_without_axes_there_is_one_point(self) -> None:
        """A replay with defaults."""
        assert list(Grid({})) == [{}]

    def test_only_axes_with_several_values_vary(self) -> None:
        """One value is a condition of all points."""
        assert Grid({"gpu": ["h100"], "block-size": ["16", "32"]}).varying == ["block-size"]

    @given(st.lists(st.integers(1, 4), max_size=5))
    def test_its_length_is_the_number_of_points(self, sizes: list[int]) -> None:
        """All combinations, each once."""
        grid = Grid({f"axis-{i}": [str(v) for v in range(size)] for i, size in enumerate(sizes)})
        points = [tuple(point.items()) for point in grid]
        assert len(points) == len(set(points)) == len(grid)

    def test_refuses_a_value_twice(self) -> None:
        """It would be one point done twice."""
        with pytest.raises(PagedKVError, match="--gpu states h100 2 times"):
            Grid({"gpu": ["h100", "b200", "h100"]})

    def test_refuses_an_axis_without_values(self) -> None:
        """It would leave no point at all."""
        with pytest.raises(PagedKVError, match="--gpu has no value"):
            Grid({"gpu": []})

    def test_refuses_more_points_than_anybody_waits_for(self) -> None:
        """With the numbers."""
        axes = {name: [str(i) for i in range(400)] for name in ("a", "b")}
        with pytest.raises(PagedKVError, match=rf"400 x 400 = 160,000 points, at most {MOST_POINTS:,}"):
            Grid(axes)


class TestGridFile:
    TOML = 'gpu = "h100"\nblock_size = [16, 64]\nspeed = [0.5, 1]\nno-prefix-caching = [false, true]\n'
    AXES: ClassVar[dict[str, tuple[Setting, ...]]] = {
        "gpu": ("h100",),
        "block-size": ("16", "64"),
        "speed": ("0.5", "1"),
        "no-prefix-caching": (False, True),
    }

    def test_toml(self, tmp_path: Path) -> None:
        """Single values, lists, flags; names with dashes or underscores; the file's order."""
        axes = read_grid_file(written(tmp_path, self.TOML))
        assert axes == self.AXES
        assert list(axes) == list(self.AXES)

    def test_json(self, tmp_path: Path) -> None:
        """The same in JSON, told by the suffix."""
        text = json.dumps(
            {"gpu": "h100", "block_size": [16, 64], "speed": [0.5, 1], "no-prefix-caching": [False, True]}
        )
        assert read_grid_file(written(tmp_path, text, "grid.json")) == self.AXES

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "holds no options"),
            ("gpu = ", "grid.toml: "),
            ("block-size = [16]\nblock_size = [32]", "block-size is there twice"),
            ("gpu = {h100 = 1}", "grid.toml: gpu: {'h100': 1} is no value"),
            ("speed = [nan]", "speed: nan is no value"),
            ("block-size = [[16, 32]]", r"block-size: \[16, 32\] is no value"),
        ],
    )
    def test_refuses(self, tmp_path: Path, text: str, message: str) -> None:
        """What is no TOML, or no options; the file is named."""
        with pytest.raises(PagedKVError, match=message):
            read_grid_file(written(tmp_path, text))

    def test_refuses_json_that_is_a_list(self, tmp_path: Path) -> None:
        """Options have names."""
        with pytest.raises(PagedKVError, match="holds no options"):
            read_grid_file(written(tmp_path, "[1, 2]", "grid.json"))

    def test_refuses_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        """The path is in the message."""
        with pytest.raises(PagedKVError, match=r"cannot read .*none\.toml: No such file"):
            read_grid_file(str(tmp_path / "none.toml"))

    def test_refuses_what_is_no_text(self, tmp_path: Path) -> None:
        """Bytes that are no UTF-8."""
        path = tmp_path / "grid.toml"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(PagedKVError, match="cannot read"):
            read_grid_file(str(path))


class TestOptions:
    def test_the_axes_that_a_planner_asks_for_are_there(self) -> None:
        """Block size, dtype, policy, GPU, memory, blocks, batch, arrival speed, model."""
        wanted = "block-size kv-dtype policy gpu gpu-memory num-blocks max-batch speed model weight-bits"
        assert set(wanted.split()) <= set(point_options())

    def test_what_differs_between_runs_or_is_no_points_own_is_not(self) -> None:
        """Outputs, reading, the trace itself, and times measured on whatever machine runs the point."""
        unwanted = {"json", "plot", "html", "timeline", "slo", "format", "seed", "limit", "hits-only", "help"}
        assert not (unwanted | {"measure-attention"}) & set(point_options())

    def test_a_point_is_a_replays_command_line(self) -> None:
        """What the parser of `pagedkv replay` makes of it."""
        args = parse_point({"block-size": "64", "policy": "sieve", "no-prefix-caching": True, "speed": "2"})
        assert (args.block_size, args.policy, args.no_prefix_caching, args.speed) == (64, "sieve", True, 2.0)
        assert arguments_of({"no-prefix-caching": False}) == []

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ({"colour": ("red",)}, "a sweep has no option --colour"),
            ({"measure-attention": ("cpu",)}, "a sweep has no option --measure-attention"),
            ({"block-size": ("16", "0")}, "'0' is no whole number from 1"),
            ({"kv-dtype": ("int4",)}, "int4"),
            ({"gpu-memory": ("lots",)}, "'lots' is no size"),
            ({"no-prefix-caching": ("yes",)}, "takes true or false, got yes"),
            ({"gpu": (True,)}, "takes a value, not true or false, got True"),
        ],
    )
    def test_refuses(self, axes: dict[str, tuple[Setting, ...]], message: str) -> None:
        """An option that is none, and values that the replay would refuse."""
        with pytest.raises(PagedKVError, match=message):
            check_axes(axes)
