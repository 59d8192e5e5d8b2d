"""Readers of trace files: one file per format, one table of them, requests as a stream or as arrays."""

from pagedkv.sim.readers.formats import FORMATS
from pagedkv.sim.readers.reading import Reading, open_trace, read_trace
from pagedkv.sim.readers.row import ReadOptions, Row

__all__ = ["FORMATS", "ReadOptions", "Reading", "Row", "open_trace", "read_trace"]
