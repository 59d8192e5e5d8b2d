"""The engine loop: what runs in which step, over a real manager."""
