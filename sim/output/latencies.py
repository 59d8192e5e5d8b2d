"""The latencies of each request of a replay, and the table of requests."""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

import numpy as np

from pagedkv.sim.output.records import FloatArray, Records
from pagedkv.sim.replay import ReplayResult
from pagedkv.sim.requests import Requests

LATENCIES = ("ttft", "tpot", "e2e")
"""What a request has one of; its ITL are many."""

COLUMNS = (
    "request",
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "first_token_s",
    "finish_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
)


class Latencies(NamedTuple):
    """[requests] float64 seconds each; NaN where a request has none. Formulas are in `metrics`."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray

    def of(self, name: str) -> FloatArray:
        """The column of a latency by its name in ``LATENCIES``."""
        column: FloatArray = getattr(self, f"{name}_s")
        return column


def latencies_of(trace: Requests, records: Records) -> Latencies:
    """Latencies per request: the values that the summary's distributions describe."""
    arrival_s = arrivals_of(trace, records)
    ttft = records.first_token_s - arrival_s
    e2e = records.finish_s - arrival_s
    gaps = np.where(trace.output_len > 1, trace.output_len - 1, np.nan)
    return Latencies(ttft, (e2e - ttft) / gaps, e2e)


def arrivals_of(trace: Requests, records: Records) -> FloatArray:
    """[requests] float64 seconds: when each came, which in a session may depend on the run."""
    return trace.arrival_s if records.arrival_s is None else records.arrival_s


def requests_csv(result: ReplayResult) -> str:
    """One row per request in replay order; seconds with nine decimals, empty where there is no value.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> from pagedkv.sim.timing.models import load_model
    >>> from pagedkv.sim.replay import ReplaySetup, run_replay
    >>> from pagedkv.sim.trace import Trace
    >>> trace = Trace.from_lengths([0.0], [100], [1])
    >>> setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=100)
    >>> requests_csv(run_replay(trace, setup)).splitlines()[1].split(",")[:4]
    ['1', '0.000000000', '100', '1']
    """
    trace, records = result.trace, result.records
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    columns = (
        range(1, len(trace) + 1),
        _seconds(arrivals_of(trace, records)),
        trace.input_len.tolist(),
        trace.output_len.tolist(),
        _seconds(records.first_token_s),
        _seconds(records.finish_s),
        *map(_seconds, latencies_of(trace, records)),
    )
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _seconds(values: FloatArray) -> list[str]:
    return [f"{value:.9f}" if np.isfinite(value) else "" for value in values.tolist()]
