"""Checkpoints: one file with everything that a run needs to resume and a chat needs to begin."""
