"""Many replays: a grid of options, on processes, Dask or Ray, resumable."""
