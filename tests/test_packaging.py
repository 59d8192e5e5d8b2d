"""What is installed, what imports what, and that the documents tell the truth."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv

ROOT = Path(__file__).parent.parent
CHECKOUT = (ROOT / "pyproject.toml").is_file()
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason="needs the checkout: these are installed files")

NEEDS_TORCH = {"cache", "kv_write", "native", "quantization", "storage", "triton_write"}


def python(code: str, **environment: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return done.stdout.strip()


def test_import_does_not_import_torch() -> None:
    """The manager and the whole simulator start without torch."""
    code = (
        "import sys, pagedkv.testing, pagedkv.sim.cli as c; c.build_parser(); print('torch' in sys.modules)"
    )
    assert python(code) == "False"


def test_classes_that_need_torch_come_when_asked_for() -> None:
    """The names are there, and asking for them imports torch."""
    code = "import sys, pagedkv; pagedkv.PagedKVCache; pagedkv.KVStorage; print('torch' in sys.modules)"
    assert python(code) == "True"


def test_no_folder_becomes_a_top_level_package() -> None:
    """An install must not claim the names attention and sim."""
    code = "import sys, pagedkv.attention, pagedkv.sim.cli; print({'attention', 'sim'} & set(sys.modules))"
    assert python(code) == "set()"


def test_every_public_name_resolves_and_is_documented() -> None:
    """``__all__`` holds no stale name, and no public class lacks a docstring."""
    for name in pagedkv.__all__:
        value = getattr(pagedkv, name)
        assert isinstance(value, int) or (value.__doc__ or "").strip(), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The lazy names do not hide a typo."""
    with pytest.raises(AttributeError, match="no attribute 'PagedKVCach'"):
        pagedkv.__getattr__("PagedKVCach")


@needs_checkout
def test_every_package_folder_is_declared_and_linked() -> None:
    """The explicit package list cannot rot: each folder with an ``__init__.py`` is in it."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^packages = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert declared is not None
    # the real folders: those inside pagedkv/ are links
    folders = {
        path.parent.relative_to(ROOT)
        for name in ("pagedkv", "attention", "sim")
        for path in (ROOT / name).glob("**/__init__.py")
        if path.parent.resolve() == path.parent
    }
    modules = {".".join(path.parts) for path in folders}
    wanted = {name if name.startswith("pagedkv") else f"pagedkv.{name}" for name in modules}
    assert set(re.findall(r'"([\w.]+)"', declared[1])) == wanted
    for name in ("attention", "sim"):
        assert (ROOT / "pagedkv" / name).is_symlink()
        assert os.readlink(ROOT / "pagedkv" / name) == f"../{name}"


@needs_checkout
def test_compiled_parts_are_optional_and_their_sources_are_shipped() -> None:
    """An install without a compiler succeeds, and an sdist can be compiled."""
    calls = [
        {str(k.arg): ast.unparse(k.value) for k in node.keywords}
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Extension"
    ]
    assert [call["optional"] for call in calls] == ["True"] * 2
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    for call in calls:
        for files in (call["sources"], call["depends"]):
            pattern = re.search(r"'(.*)'", files)
            assert pattern is not None and pattern[1] in manifest
            assert list(ROOT.glob(pattern[1]))


@needs_checkout
def test_versions_agree() -> None:
    """The version is the same wherever it stands."""
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{pagedkv.__version__}"' in text
    assert f"## {pagedkv.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def _imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


FLOOR_0 = (
    "announced",
    "arithmetic",
    "block_cache",
    "block_ids",
    "block_pool",
    "content",
    "copies",
    "core",
    "drafts",
    "errors",
    "events",
    "fences",
    "hf_config",
    "hf_fields",
    "histogram",
    "invariants",
    "layer_spec",
    "maintenance",
    "namespace",
    "native_block_pool",
    "native_prefix_index",
    "numpy_block_pool",
    "numpy_prefix_index",
    "opened",
    "page_table",
    "policies/__init__",
    "policies/arc",
    "policies/belady",
    "policies/cost",
    "policies/fifo",
    "policies/fingerprints",
    "policies/index_view",
    "policies/leaf_policy",
    "policies/lfu",
    "policies/lru",
    "policies/native_lru",
    "policies/numpy_lru",
    "policies/policy",
    "policies/priority",
    "policies/quotas",
    "policies/residency",
    "policies/s3fifo",
    "policies/sieve",
    "prefix_index",
    "retention",
    "sequences",
    "spec",
    "stats",
    "tails",
)


@needs_checkout
@pytest.mark.parametrize("name", FLOOR_0)
def test_floor_0_imports_nothing_above_it(name: str) -> None:
    """Ids, tables, index, eviction and spec know neither the manager nor any tensor nor a clock."""
    imported = _imports(ROOT / "pagedkv" / f"{name}.py")
    above = {f"pagedkv.{m}" for m in ("manager", "storage", "cache", "testing", "attention", "sim")}
    assert not {m for m in imported if any(m == a or m.startswith(a + ".") for a in above)}
    assert not imported & {"torch", "time", "datetime", "random"}


@needs_checkout
def test_manager_knows_neither_tensors_nor_clocks() -> None:
    """Time and randomness are passed in, or do not exist."""
    assert not _imports(ROOT / "pagedkv" / "manager.py") & {"torch", "time", "datetime", "random"}


@needs_checkout
@pytest.mark.parametrize("path", sorted((ROOT / "attention").glob("*.py")), ids=lambda p: p.stem)
def test_attention_knows_neither_manager_nor_simulator(path: Path) -> None:
    """Attention reads tensors by block tables; who filled them is not its business."""
    assert not {
        m for m in _imports(path) if m.startswith(("pagedkv.sim", "pagedkv.manager", "pagedkv.cache"))
    }


MEASURES = {"calibrate", "measured_step_time"}
"""What runs this machine's own attention, and imports torch when it does."""


@needs_checkout
@pytest.mark.parametrize("path", sorted((ROOT / "sim").glob("**/*.py")), ids=lambda p: p.stem)
def test_simulator_never_imports_torch(path: Path) -> None:
    """A planner's machine needs no tensors, except to measure itself."""
    uses = any(m.split(".")[0] == "torch" for m in _imports(path))
    assert uses == (path.stem in MEASURES)


@needs_checkout
def test_what_measures_imports_torch_only_then() -> None:
    """Torch stays out when the modules are imported, and no module of the simulator brings it in."""
    names = [
        ".".join(("pagedkv", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / "sim").glob("**/*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    code = (
        f"import sys, importlib; [importlib.import_module(n) for n in {names}]; print('torch' in sys.modules)"
    )
    assert python(code) == "False"


@needs_checkout
def test_ci_runs_the_readme_test_command() -> None:
    """What the README promises a stranger is what CI does."""
    commands = re.findall(r"^(pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert "pagedkv replay" in commands[0]
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


@needs_checkout
def test_readme_example_runs_and_prints_what_it_says() -> None:
    """The embedding example is executed, and its comments say what it prints."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    expected = re.findall(r"^print\(.*\)\s+# (.*)$", blocks[0], re.MULTILINE)
    assert python(blocks[0]).splitlines() == expected
    assert len(blocks[0].splitlines()) <= 24
