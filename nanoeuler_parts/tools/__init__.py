"""Verbs that inspect models and runs, and `generate --file`."""
