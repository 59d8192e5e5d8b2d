"""The operation under torch's own checks, its compiler, and the choice of a backend."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from pagedkv.attention import backends, paged_attention, paged_mla_attention
from pagedkv.attention.op import paged_attention_op
from pagedkv.attention.testing import Batch, make_batch
from pagedkv.errors import BlockError, PagedKVError


def op_arguments(batch: Batch, backend: str, everything: bool) -> tuple[Any, ...]:
    out = batch.q.new_empty(*batch.q.shape[:-1], batch.v.shape[3])
    lse = torch.empty(batch.q.shape[:-1]) if everything else None
    mass = torch.empty(*batch.q.shape[:-1], batch.tables.shape[1]) if everything else None
    window, softcap = (5, 2.0) if everything else (None, None)
    sinks = torch.zeros(batch.q.shape[-2]) if everything else None
    scales = [batch.scales.get(name) for name in ("k_scale", "v_scale")]
    return (
        batch.q, batch.k, batch.v, batch.tables, batch.lens, 0.3, *scales, window, sinks, softcap,
        out, lse, mass, None, backend,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_torch_finds_nothing_wrong_with_the_operation(backend: str, everything: bool, int8: bool) -> None:
    """``torch.library.opcheck``: what it writes is what its schema says, and the fake kernel agrees."""
    batch = make_batch([0, 3, 9], q_len=2 if everything else None).to(torch.float32)
    batch = batch.quantized() if int8 else batch
    checks = torch.library.opcheck(paged_attention_op, op_arguments(batch, backend, everything))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    """No graph break, the same numbers, and lengths that grow need no new graph."""
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def step(q: torch.Tensor, batch_lens: torch.Tensor) -> torch.Tensor:
        attended = paged_attention(q * 2, batch.k, batch.v, batch.tables, batch_lens, window=7)
        return attended + 1

    batch = make_batch([3, 9, 30]).to(torch.float32)
    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=dynamic)
    for lens in (batch.lens, batch.lens - 1):
        torch.testing.assert_close(compiled(batch.q, lens), step(batch.q, lens))
    assert len(graphs) == 1


def test_it_survives_functionalization() -> None:
    """``aot_eager`` rewrites what is written in place: the caller's own outputs are filled all the same."""
    batch = make_batch([3, 9]).to(torch.float32)

    def step(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        paged_attention(q, batch.k, batch.v, batch.tables, batch.lens, out=out, lse=lse)
        return out * 2

    out, lse = torch.empty(2, 4, 8), torch.empty(2, 4)
    doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(batch.q, out, lse)
    wanted, wanted_lse = batch.attend_with_lse("auto")
    torch.testing.assert_close((doubled, out, lse), (wanted * 2, wanted, wanted_lse))


def test_a_compiler_meets_the_same_errors_as_a_call() -> None:
    """The fake kernel checks shapes."""
    batch = make_batch([3, 9]).to(torch.float32)

    def step(q: torch.Tensor) -> torch.Tensor:
        return paged_attention(q, batch.k, batch.v, batch.tables[:1], batch.lens)

    with pytest.raises(Exception, match=r"block_tables must be torch.int32 \(2, 5\), got .*\(1, 5\)"):
        torch.compile(step, fullgraph=True, backend="eager")(batch.q)


def test_backends_say_why_they_are_not_available() -> None:
    """The readable reference and torch are always there; of the others each has a reason or runs."""
    infos = {info.name: info for info in backends()}
    assert list(infos) == ["reference", "torch", "native", "triton", "flashinfer", "flash-attn"]
    assert infos["reference"].available and infos["torch"].available
    assert all(info.available == (not info.reason) for info in infos.values())


def test_an_unknown_backend_is_refused_with_the_names() -> None:
    """With "auto" among them."""
    message = "no attention backend 'abacus', there are: auto, reference, torch, native, triton, flash.+"
    with pytest.raises(PagedKVError, match=message):
        make_batch([3]).attend("abacus")


@pytest.mark.parametrize("info", [info for info in backends() if not info.available])
def test_a_backend_that_is_not_available_is_refused_with_its_reason(info: Any) -> None:
    """Asked for by name."""
    with pytest.raises(PagedKVError, match=f"'{info.name}' is not available here: .+"):
        make_batch([3]).attend(info.name)


def test_a_backend_that_cannot_serve_a_call_says_what_is_missing() -> None:
    """And "auto" takes one that can."""
    if not {info.name: info.available for info in backends()}["native"]:
        pytest.skip("the native backend is not built here")
    batch = make_batch([3])
    with pytest.raises(PagedKVError, match=r"'native' cannot serve this call: .*float64"):
        batch.attend("native")
    assert torch.equal(batch.attend("auto"), batch.attend("torch"))


def test_mla_is_attention_whose_values_are_the_leading_part_of_the_keys() -> None:
    """Latent 16 and rope 8, against the same call with copied values."""
    batch = make_batch([0, 5, 700], heads=(6, 1), dims=(24, 16)).to(torch.float32)
    lse = torch.empty(3, 6)
    got = paged_mla_attention(batch.q, batch.k, batch.tables, batch.lens, latent_rank=16, scale=0.25, lse=lse)
    copied = batch.k[..., :16].clone()
    wanted_lse = torch.empty(3, 6)
    wanted = paged_attention(
        batch.q, batch.k, copied, batch.tables, batch.lens, scale=0.25, lse=wanted_lse, backend="reference"
    )
    torch.testing.assert_close((got, lse), (wanted, wanted_lse), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("latent_rank", [0, 25])
def test_a_latent_outside_the_key_is_refused(latent_rank: int) -> None:
    """With the shape."""
    batch = make_batch([5], heads=(6, 1), dims=(24, 16))
    with pytest.raises(PagedKVError, match=rf"got \(5, 1, 4, 24\) and latent_rank {latent_rank}"):
        paged_mla_attention(batch.q, batch.k, batch.tables, batch.lens, latent_rank=latent_rank, scale=1.0)


def test_contents_on_an_accelerator_are_checked_in_debug_mode_only() -> None:
    """The meta device stands for one whose contents the host cannot see: looking there is an error."""
    script = (
        "import torch\n"
        "from pagedkv.attention.arguments import AttentionArguments\n"
        "make = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device='meta')\n"
        "table, lens = make(1, 2, dtype=torch.int32), make(1, dtype=torch.int32)\n"
        "cache, q = make(3, 1, 4, 8), make(1, 1, 8)\n"
        "args = AttentionArguments(q, cache, cache, table, lens, 1.0, *[None] * 5, q, *[None] * 3)\n"
        "args.check_contents()\n"
    )
    for debug, code in (("0", 0), ("1", 1)):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PAGEDKV_DEBUG": debug},
            capture_output=True,
            check=False,
        )
        assert result.returncode == code, result.stderr.decode()


def test_contents_on_the_cpu_are_always_checked() -> None:
    """By every backend."""
    batch = make_batch([5, 9]).to(torch.float32)
    batch.tables[1, 2] = 999
    for info in backends():
        if info.available and info.name != "triton":
            with pytest.raises(BlockError, match=r"block_tables\[1, 2\] is 999, outside 0\.\.7"):
                batch.attend(info.name)
