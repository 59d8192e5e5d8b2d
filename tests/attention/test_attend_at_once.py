"""The short way of a plain call: past the dispatcher, and past the checks in Python where everything fits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv import native
from pagedkv.attention import paged_attention
from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.cpu_backend import attend, attend_at_once
from pagedkv.attention.testing import Batch, make_batch
from pagedkv.errors import PagedKVError

pytestmark = [
    pytest.mark.skipif(native.reason() is not None, reason=str(native.reason())),
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10 lacks the table"
    ),
]

native_attend: Any = native.attend
Options = dict[str, Any]
NOTHING = ("k_scale", "v_scale", "window", "sinks", "softcap", "lse", "block_mass")


def options_of(batch: Batch) -> Options:
    """All arguments but the plan and the backend, of a call that fits."""
    out = torch.full((*batch.q.shape[:-1], batch.v.shape[3]), 7.0, dtype=batch.q.dtype)
    given = {"q": batch.q, "k": batch.k, "v": batch.v, "block_tables": batch.tables, "seq_lens": batch.lens}
    return {**dict.fromkeys(NOTHING), **given, "scale": 0.3, "out": out, **batch.scales}


def every_option(batch: Batch) -> Options:
    """The same with whatever is optional."""
    leading = batch.q.shape[:-1]
    return options_of(batch) | {
        "window": 5,
        "softcap": 2.0,
        "sinks": torch.linspace(-1, 1, 2 * leading[-1])[::2],
        "lse": torch.empty(leading),
        "block_mass": torch.empty(*leading, batch.tables.shape[1]),
    }


@pytest.mark.parametrize("q_len", [None, 1, 3])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("make", [options_of, every_option])
def test_it_serves_what_fits(q_len: int | None, int8: bool, make: Callable[[Batch], Options]) -> None:
    """And gives what the checked arguments give, bit for bit."""
    batch = make_batch([0, 3, 90], q_len=q_len).to(torch.float32)
    batch = batch.quantized() if int8 else batch
    options, checked = make(batch), make(batch)
    assert attend_at_once(**options)
    args = AttentionArguments(**checked, plan=None)
    attend(args)
    for name in ("out", "lse", "block_mass"):
        if options[name] is not None:
            assert torch.equal(options[name], checked[name])


def negated(x: Tensor) -> Tensor:
    """A view whose memory holds the negative of every entry."""
    view = torch.complex(x, -x).conj().imag
    assert view.is_neg() and torch.equal(view.resolve_neg(), x)
    return view


MISFITS: dict[str, Callable[[Options], Options]] = {
    "q of another head_dim": lambda o: {"q": o["q"][..., 1:]},
    "q of two dimensions": lambda o: {"q": o["q"][0]},
    "query heads no multiple of KV heads": lambda o: {"q": o["q"][:, :-1], "out": o["out"][:, :-1]},
    "nine query tokens": lambda o: {x: o[x].unsqueeze(1).repeat(1, 9, 1, 1) for x in ("q", "out")},
    "fp64": lambda o: {x: o[x].double() for x in ("q", "out")},
    "k of three dimensions": lambda o: {"k": o["k"][0]},
    "v of other blocks": lambda o: {"v": o["v"][1:]},
    "v of another dtype": lambda o: {"v": o["v"].half()},
    "k with a stride": lambda o: {"k": o["k"].repeat_interleave(2, 3)[..., ::2]},
    "a table of int64": lambda o: {"block_tables": o["block_tables"].long()},
    "a table of one row": lambda o: {"block_tables": o["block_tables"][:1]},
    "too few lengths": lambda o: {"seq_lens": o["seq_lens"][1:]},
    "a length beyond its table": lambda o: {"seq_lens": o["seq_lens"] + 10_000},
    "a block that is none": lambda o: {"block_tables": o["block_tables"] + 10_000},
    "an output of another dtype": lambda o: {"out": o["out"].half()},
    "an output of another width": lambda o: {"out": o["out"][..., 1:]},
    "an expanded output": lambda o: {"out": o["out"][:1].expand_as(o["out"])},
    "an lse of other heads": lambda o: {"lse": torch.empty(o["q"].shape[:-1])[:, 1:]},
    "a block mass of other blocks": lambda o: {"block_mass": torch.empty(*o["q"].shape[:-1], 1)},
    "scales without int8": lambda o: {"k_scale": torch.ones(o["k"].shape[:3])},
    "too few sinks": lambda o: {"sinks": torch.zeros(1)},
    "a window of nothing": lambda _: {"window": 0},
    "a softcap of nothing": lambda _: {"softcap": 0.0},
    "an infinite scale": lambda _: {"scale": float("inf")},
    "another device": lambda o: {"q": o["q"].to("meta")},
    "a negated q": lambda o: {"q": negated(o["q"])},
    "a negated v": lambda o: {"v": negated(o["v"])},
    "negated sinks": lambda o: {"sinks": negated(torch.zeros(o["q"].shape[1]))},
    "no tensor": lambda o: {"seq_lens": o["seq_lens"].numpy()},
    "None": lambda _: {"seq_lens": None},
    "a window beyond 64 bits": lambda _: {"window": 2**80},
    "a scale in words": lambda _: {"scale": "large"},
}


@pytest.mark.parametrize("name", MISFITS)
def test_it_leaves_the_rest_alone(name: str) -> None:
    """It answers False and has written nothing."""
    options = options_of(make_batch([3, 40, 90]).to(torch.float32))
    assert attend_at_once(**options)
    options["out"].fill_(7.0)
    changed = options | MISFITS[name](options)
    assert not attend_at_once(**changed)
    assert changed["out"].unique().tolist() == [7.0]


def test_scales_of_another_shape_are_left_alone() -> None:
    """The pointers alone would do, and read beyond their end."""
    options = options_of(make_batch([3, 40]).to(torch.float32).quantized())
    for name in ("k_scale", "v_scale"):
        assert not attend_at_once(**options | {name: options[name][:, :, 1:]})
        assert not attend_at_once(**options | {name: None})


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_watches_operations_sees_it() -> None:
    """The dispatcher is passed by only where nobody could tell."""
    batch = make_batch([3, 40]).to(torch.float32)
    plain = batch.attend("native")
    with Seen() as seen:
        watched = batch.attend("native")
    assert "pagedkv::paged_attention" in seen.names
    assert torch.equal(plain, watched)


def test_errors_are_worded_on_the_long_way() -> None:
    """With the numbers, as if there were no short one."""
    batch = make_batch([3, 40]).to(torch.float32)
    with pytest.raises(PagedKVError, match=r"seq_lens must be torch.int32 \(2,\), got torch.int32 \(1,\)"):
        paged_attention(batch.q, batch.k, batch.v, batch.tables, batch.lens[1:])


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_a_negated_view_is_refused_by_name(backend: str) -> None:
    """Its memory holds other numbers than torch shows."""
    batch = make_batch([3, 40]).to(torch.float32)
    given = {"q": batch.q, "k": batch.k, "v": batch.v, "out": torch.zeros_like(batch.q)}
    for name, x in given.items():
        changed: Options = given | {name: negated(x)}
        with pytest.raises(PagedKVError, match=rf"^{name} is a negated view: pass {name}\.resolve_neg\(\)$"):
            paged_attention(**changed, block_tables=batch.tables, seq_lens=batch.lens, backend=backend)


def test_a_torch_without_the_exchange_table_takes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch before 2.10: the results are the same."""
    batch = make_batch([3, 40, 90]).to(torch.float32)
    expected = batch.attend("native")
    monkeypatch.setattr(native, "attend", lambda: None)
    assert not attend_at_once(**options_of(batch))
    assert torch.equal(batch.attend("native"), expected)
    for table in (None, object(), 3):
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", table, raising=False)
        assert native_attend.__wrapped__() is None


def test_what_torch_offers_is_used() -> None:
    """From 2.10 on every tensor carries the table; without this the short way would be lost unseen."""
    assert (native.attend() is not None) == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
