"""Measuring decode attention on this machine: backends and peers over the same cold blocks.

::

    measure        every contender once per round, checked before it is timed
    cell           sizes of a decode step, and sets of blocks that take turns, so that no cache holds them
    rounds         interleaved rounds, and the clock
    read_ceiling   a pass that reads the same blocks and does nothing else
    peers          what else attends: torch, FlexAttention (flex_peer), vLLM (vllm_peer), on CUDA (gpu_peers)
    contender      what is timed          conditions   under which
"""
