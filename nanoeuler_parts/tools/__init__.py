"""Verbs that inspect and measure models and runs, and `generate --file`."""
