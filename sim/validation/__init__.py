"""The step-time models against measured runs, kernels and rates."""
