"""How long a step takes: models of hardware, measured tables, calibration."""
