"""Verbs that inspect and measure models and runs, `generate --file`, and JSON mode."""
