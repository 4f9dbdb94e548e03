"""Conversations: templates, sampling settings, the terminal, JSON mode, and which model is used."""
