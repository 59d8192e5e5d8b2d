"""The TPOT of requests that are served together: decode steps, and the prefill of others in between."""

from __future__ import annotations

import numpy as np

from pagedkv.sim.timing.roofline import Roofline


def prefill_share_s(step: Roofline, concurrency: int, prompt_len: int, output_len: int) -> float:
    """Seconds that prefill of other requests adds to each token, at a fixed concurrency.

    While a request emits ``output_len`` tokens, each of the others ends once and is replaced: their
    prompts are computed between its tokens. A prompt costs what its tokens add to a step.
    """
    alone = step.fixed_s(concurrency, concurrency)
    flops = step.prefill_flops(0, prompt_len)
    mixed = step.fixed_s(concurrency + prompt_len, concurrency, flops)
    each = mixed - alone + step.prefill_kv_s(0, prompt_len)
    return (concurrency - 1) / output_len * each


def served_tpot_s(step: Roofline, concurrency: int, prompt_len: int, output_len: int) -> float:
    """Mean TPOT: a decode step at the mean context, and the share of the others' prompts.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> from pagedkv.sim.timing.models import load_model
    >>> step = Roofline.from_gpu(load_model("llama-3.1-8b"), load_gpu("h100"))
    >>> round(served_tpot_s(step, 8, 1024, 512) * 1e3, 1)   # published: 7.42 ms
    7.4
    """
    contexts = np.full(concurrency, prompt_len + output_len // 2, np.int64)
    return step.decode_s(contexts) + prefill_share_s(step, concurrency, prompt_len, output_len)
