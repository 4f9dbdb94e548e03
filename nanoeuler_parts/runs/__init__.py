"""Training runs: settings, data, the loop, logs and checkpoints, --resume."""
