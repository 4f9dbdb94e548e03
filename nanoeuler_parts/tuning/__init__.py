"""Fine-tuning: examples to learn from, supervised runs and preference runs."""
