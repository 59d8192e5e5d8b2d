"""What a run counted and modelled, and its shapes: tables, files, plots, one HTML page."""
