"""Fleets: hand-worked routing, one replica against a plain replay, conservation, and the same bytes twice."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.sim.cli import main
from pagedkv.sim.engine.engine import EngineConfig
from pagedkv.sim.engine.pool import plain
from pagedkv.sim.fleet.fleet import FleetResult, run_fleet
from pagedkv.sim.fleet.fleet_summary import fleet_document, summarize_fleet
from pagedkv.sim.fleet.router import ROUTERS, PrefixAware
from pagedkv.sim.readers.reading import read_trace
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

BLOCK = 16
DATA = os.environ.get("PAGEDKV_DATA")


def setup(num_blocks: int = 20_000, **options: Any) -> ReplaySetup:
    return ReplaySetup(load_model("llama-3.1-8b"), load_gpu("h100"), num_blocks, **options)


def of_prompts(prompts: str, every_s: float = 10.0, output_len: int = 4) -> Trace:
    """A request per letter, 100 blocks and one token long; equal letters are equal prompts."""
    letters = sorted(set(prompts))
    num_tokens = 100 * BLOCK + 1
    ids = np.concatenate([101 * letters.index(letter) + np.arange(101) for letter in prompts])
    return Trace(
        prompts,
        np.arange(len(prompts), dtype=np.float64) * every_s,
        np.full(len(prompts), num_tokens),
        np.full(len(prompts), output_len),
        ids,
        np.arange(len(prompts) + 1) * 101,
        BLOCK,
        101 * len(letters),
    )


def at(trace: Trace, *arrival_s: float) -> Trace:
    return replace(trace, arrival_s=np.array(arrival_s, np.float64))


def hits_of(result: FleetResult) -> list[int]:
    return [replica.engine.records.hit_tokens for replica in result.fleet.replicas]


def routed(result: FleetResult) -> list[int]:
    replicas: list[int] = result.fleet.replica_of.tolist()
    return replicas


class TestByHand:
    """Prompts A A B B, each done before the next one comes, on two replicas."""

    def test_round_robin_finds_nothing(self) -> None:
        """A and B meet each replica once: 0 1 0 1, no hit."""
        result = run_fleet(of_prompts("AABB"), setup(), 2, "round-robin")
        assert routed(result) == [0, 1, 0, 1]
        assert hits_of(result) == [0, 0]

    def test_least_loaded_knows_no_cache(self) -> None:
        """All are idle at each arrival, so the one with fewer requests is next."""
        result = run_fleet(of_prompts("AABB"), setup(), 2, "least-loaded")
        assert routed(result) == [0, 1, 0, 1]

    def test_prefix_aware_sends_equals_to_one_place(self) -> None:
        """The second A and the second B find the 100 full blocks of the first."""
        result = run_fleet(of_prompts("AABB"), setup(), 2, "prefix-aware")
        assert routed(result) == [0, 0, 1, 1]
        assert hits_of(result) == [100 * BLOCK, 100 * BLOCK]
        summary = summarize_fleet(result)
        assert summary.token_hit_rate == 200 * BLOCK / (4 * (100 * BLOCK + 1))
        assert [replica.requests for replica in summary.replicas] == [2, 2]

    def test_news_that_come_late_are_no_use(self) -> None:
        """With a delay longer than the gap, the router does not know of the first A when the second comes."""
        result = run_fleet(of_prompts("AABB"), setup(), 2, "prefix-aware", event_delay_s=15.0)
        assert routed(result) == [0, 1, 0, 1]

    def test_who_comes_at_once_is_spread(self) -> None:
        """Four at the same moment: what is queued counts before any of it is computed."""
        for router in ("least-loaded", "prefix-aware"):
            result = run_fleet(of_prompts("AABB", every_s=0.0), setup(), 2, router)
            assert routed(result) == [0, 1, 0, 1]

    def test_load_outweighs_a_hit(self) -> None:
        """A is cached on 0 and comes twice at 30 s. The first goes there; then 0 costs 1 queued token +
        w x 1601 open - 1600 cached, and 1 costs nothing: 0 is cheaper if w is below 0.9988."""
        trace = at(of_prompts("AAA"), 0, 30, 30)
        for weight, replica in ((0.0, 0), (0.99, 0), (1.0, 1)):
            result = run_fleet(trace, setup(), 2, "prefix-aware", load_weight=weight)
            assert routed(result) == [0, 0, replica]
            assert sum(hits_of(result)) == (200 if replica == 0 else 100) * BLOCK

    def test_queues_are_kept_even(self) -> None:
        """After A on 0, five at once: B to 1, sent fewer; C to 0, idle; D to 1, as long a queue, sent fewer;
        the As to 0, where 1 and then 2 of their tokens are left to compute."""
        trace = at(of_prompts("ABCDAA"), 0, 30, 30, 30, 30, 30)
        result = run_fleet(trace, setup(), 2, "prefix-aware", load_weight=0.0)
        assert routed(result) == [0, 1, 0, 1, 0, 0]
        assert hits_of(result) == [200 * BLOCK, 0]


class TestAgainstOneReplay:
    @pytest.mark.parametrize("router", ROUTERS)
    @pytest.mark.parametrize("max_batch", [1, 3, 256])
    def test_a_fleet_of_one_is_a_replay(self, router: str, max_batch: int) -> None:
        """The same hits and preemptions; times differ by rounding alone, since steps are cut at arrivals."""
        trace, one = chat_long(80), setup(8000, engine=EngineConfig(max_batch=max_batch))
        alone = run_replay(trace, one)
        fleet = run_fleet(trace, one, 1, router)
        assert fleet.records.hit_tokens == alone.records.hit_tokens
        assert fleet.records.num_preemptions == alone.records.num_preemptions
        np.testing.assert_allclose(fleet.records.first_token_s, alone.records.first_token_s, rtol=1e-12)
        np.testing.assert_allclose(fleet.records.finish_s, alone.records.finish_s, rtol=1e-12)

    def test_each_replica_serves_as_if_it_were_alone(self) -> None:
        """What round-robin sends to a replica, replayed by itself, ends at the same times."""
        trace = chat_long(60)
        fleet = run_fleet(trace, setup(), 3, "round-robin")
        for i in range(3):
            mine = np.arange(i, 60, 3)
            rows = [trace.content_ids[slice(*trace.content_offsets[r : r + 2])] for r in mine]
            part = Trace(
                "part",
                trace.arrival_s[mine],
                trace.input_len[mine],
                trace.output_len[mine],
                np.concatenate(rows),
                np.cumsum([0, *map(len, rows)]),
                trace.content_block_size,
                trace.num_contents,
            )
            alone = run_replay(part, setup())
            np.testing.assert_allclose(fleet.records.finish_s[mine], alone.records.finish_s, rtol=1e-12)
            assert hits_of(fleet)[i] == alone.records.hit_tokens


class TestPromises:
    @pytest.mark.parametrize("router", ROUTERS)
    @pytest.mark.parametrize("num_replicas", [2, 5])
    def test_each_request_is_served_once(self, router: str, num_replicas: int) -> None:
        """By the replica it was sent to and no other; nothing is lost, and the pools are whole again."""
        trace = chat_long(60)
        result = run_fleet(trace, setup(8000), num_replicas, router)
        served = np.stack([np.isfinite(r.engine.records.finish_s) for r in result.fleet.replicas])
        assert (served.sum(axis=0) == 1).all()
        assert (served.argmax(axis=0) == result.fleet.replica_of).all()
        sent = sorted(request for replica in result.fleet.replicas for request in replica.requests)
        assert sent == list(range(60))
        assert result.records.num_finished == 60
        summary = summarize_fleet(result)
        assert sum(replica.output_tokens for replica in summary.replicas) == int(trace.output_len.sum())
        assert summary.itl.count == int((trace.output_len - 1).sum())

    def test_the_router_knows_what_the_managers_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without delay, at each arrival that meets a replica between its steps, and for all at the end."""
        compared = 0
        results: list[PrefixAware] = []
        choose = PrefixAware.choose

        def check(self: PrefixAware, now_s: float, prompt: Any, loads: Sequence[Any]) -> Any:
            nonlocal compared
            results.append(self)
            for index, replica in zip(self.indexes, fleets[-1].replicas, strict=True):
                if replica.engine.now <= now_s:
                    assert index.digests(now_s) == plain(replica.engine.manager, "events").events.digests()
                    compared += 1
            return choose(self, now_s, prompt, loads)

        fleets: list[Any] = []
        monkeypatch.setattr(PrefixAware, "choose", check)
        from pagedkv.sim.fleet import fleet as fleet_module

        made = fleet_module.Fleet.__init__

        def remember(self: Any, *args: Any) -> None:
            made(self, *args)
            fleets.append(self)

        monkeypatch.setattr(fleet_module.Fleet, "__init__", remember)
        result = run_fleet(chat_long(100).faster(0.2), setup(7000), 2, "prefix-aware")
        assert compared > 20
        for index, replica in zip(results[0].indexes, result.fleet.replicas, strict=True):
            manager = plain(replica.engine.manager, "events")
            assert manager.stats().evicted_blocks > 0
            assert index.digests(float("inf")) == manager.events.digests()

    def test_recording_events_changes_nothing(self) -> None:
        """Without a choice, the router that listens and one that does not agree bit by bit."""
        listening = run_fleet(chat_long(60), setup(8000), 1, "prefix-aware")
        deaf = run_fleet(chat_long(60), setup(8000), 1, "round-robin")
        assert (listening.records.finish_s == deaf.records.finish_s).all()

    @pytest.mark.parametrize("router", ROUTERS)
    def test_same_arguments_same_numbers(self, router: str) -> None:
        """Two runs differ in no bit of any figure."""
        documents = [
            json.dumps(fleet_document(summarize_fleet(run_fleet(chat_long(60), setup(8000), 3, router))))
            for _ in range(2)
        ]
        assert documents[0] == documents[1]

    def test_a_follow_up_comes_after_its_session(self) -> None:
        """Turns with think time come to the router when the turn before is done, wherever that was."""
        n, think = 12, 0.5
        lengths = {"input_len": np.full(n, 400), "output_len": np.full(n, 20)}
        trace = Trace(
            "talk", np.zeros(n), lengths["input_len"], lengths["output_len"], np.empty(0, np.int32),
            np.zeros(n + 1, np.int64), 0, 0, session=np.arange(n, dtype=np.int32) % 3,
            think_s=np.where(np.arange(n) < 3, np.nan, think),
        )  # fmt: skip
        for router in ROUTERS:
            result = run_fleet(trace, setup(), 2, router)
            arrival_s = result.records.arrival_s
            assert arrival_s is not None
            np.testing.assert_allclose(arrival_s[3:], result.records.finish_s[:-3] + think, rtol=1e-12)
            assert (result.records.first_token_s > arrival_s).all()

    def test_loads_fall_when_tokens_come_out(self) -> None:
        """A prompt is queued until its first token and open until its last; the router sees no future."""
        trace = of_prompts("A", output_len=50)
        result = run_fleet(trace, setup(), 1, "least-loaded")
        first_s, finish_s = float(result.records.first_token_s[0]), float(result.records.finish_s[0])
        (replica,) = result.fleet.replicas
        # a finished run forgets what it has seen to end, so ask about a new one at each time
        from pagedkv.sim.fleet.fleet_replica import Replica

        for now_s, queued, opened in (
            (first_s / 2, 1601, 1601),
            ((first_s + finish_s) / 2, 0, 1601),
            (finish_s, 0, 0),
        ):
            fresh = Replica(replica.engine)
            fresh.send(0, 0.0, 0)
            load = fresh.load(now_s)
            assert (load.num_routed, load.queued_tokens, load.open_tokens) == (1, queued, opened)

    @pytest.mark.parametrize(
        "options", [{"queue": "shortest"}, {"prefill_first": True}, {"coalesce": True}, {"max_batch": 3}]
    )
    def test_other_engines_are_served_too(self, options: dict[str, Any]) -> None:
        """Every request ends under each way to schedule."""
        one = setup(8000, engine=EngineConfig(**options))
        assert run_fleet(chat_long(40), one, 2, "prefix-aware").records.num_finished == 40


class TestRefusals:
    def test_what_can_never_fit(self) -> None:
        """Before anything runs, with the numbers."""
        with pytest.raises(NeverFits, match="the pool has 50"):
            run_fleet(of_prompts("AB"), setup(50), 2, "round-robin")

    def test_prefix_aware_without_prefixes(self) -> None:
        """There would be nothing to be aware of."""
        with pytest.raises(PagedKVError, match="needs prefix caching"):
            run_fleet(of_prompts("AB"), setup(prefix_caching=False), 2, "prefix-aware")

    def test_no_replicas(self) -> None:
        """At least one serves."""
        with pytest.raises(PagedKVError, match="num_replicas"):
            run_fleet(of_prompts("AB"), setup(), 0, "round-robin")


class TestCommand:
    def test_json_has_every_router(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The figures of the library, with their conditions."""
        out = tmp_path / "fleet.json"
        argv = ["fleet", "--limit", "40", "--replicas", "2", "--gpu", "h100", "--num-blocks", "8000"]
        assert main([*argv, "--json", str(out)]) == 0
        document = json.loads(out.read_text())
        assert list(document["routers"]) == list(ROUTERS)
        assert document["inputs"]["num_blocks_per_replica"] == 8000
        expected = fleet_document(summarize_fleet(run_fleet(chat_long(40), setup(8000), 2, "prefix-aware")))
        assert document["routers"]["prefix-aware"] == json.loads(json.dumps(expected))
        shown = capsys.readouterr().out
        assert "TTFT p99 [ms]" in shown
        assert "Replicas, prefix-aware" in shown

    def test_one_value_per_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A second value is no second replica; it is refused."""
        with pytest.raises(SystemExit) as stop:
            main(["fleet", "--gpu", "h100", "--gpu", "b200"])
        assert stop.value.code == 2
        assert "stated twice" in capsys.readouterr().err

    def test_unknown_gpu_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As for every command."""
        assert main(["fleet", "--gpu", "h1000", "--limit", "5"]) == 2
        assert "h1000" in capsys.readouterr().err


@cache
def _conversation() -> Trace:
    assert DATA is not None
    return read_trace(Path(DATA, "traces", "mooncake", "conversation_trace.jsonl.gz"), limit=1500)


@pytest.mark.skipif(DATA is None, reason="PAGEDKV_DATA does not name the folder of public traces")
def test_prefix_aware_pays_on_a_real_trace() -> None:
    """Conversation trace, 4 replicas: more hits than without looking at caches, and first tokens sooner."""
    model = load_model("llama-3.1-8b", block_size=512)
    one = ReplaySetup(model, load_gpu("h100"), 2000)
    found = {name: summarize_fleet(run_fleet(_conversation(), one, 4, name)) for name in ROUTERS}
    assert found["prefix-aware"].hit_tokens > 1.2 * found["round-robin"].hit_tokens
    assert found["prefix-aware"].hit_tokens > 1.2 * found["least-loaded"].hit_tokens
    means = {name: summary.ttft.mean for name, summary in found.items()}
    assert means["prefix-aware"] is not None
    assert means["round-robin"] is not None
    assert means["prefix-aware"] < means["round-robin"]
