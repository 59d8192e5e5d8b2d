"""A simulator that replays long-context traces through the real manager."""
