"""Decode attention on CUDA, in Triton: a plan, an attention kernel, a merge.

::

    plan_splits(seq_lens)          plan_kernel     how many parts each sequence is cut into, once per step
    attend(arguments)
        support                                    what it does not do
        launch, geometry                           shapes, tiles and buffers
                                   decode_kernel   float caches: one program per KV head and part
                                   mla_kernel      latent caches
                                   int8_kernel     int8 caches
                                   merge_kernel    parts into the output, by their log-sum-exp
                                   mass_kernel     the share of each block, if asked for
"""

from pagedkv.attention.triton_backend.device import unavailable
from pagedkv.attention.triton_backend.launch import attend
from pagedkv.attention.triton_backend.plan import default_target, plan_splits
from pagedkv.attention.triton_backend.support import unsupported

__all__ = ["attend", "default_target", "plan_splits", "unavailable", "unsupported"]
