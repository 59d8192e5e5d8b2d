"""Decode attention over paged K/V blocks."""
