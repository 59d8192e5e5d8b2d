"""Synthetic workloads: arrivals, lengths and what prompts share, drawn from a seed."""
