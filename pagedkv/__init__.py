"""pagedkv: an embeddable KV-cache memory manager."""
