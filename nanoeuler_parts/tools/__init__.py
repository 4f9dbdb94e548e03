"""Verbs for looking at models, prompts and runs."""
