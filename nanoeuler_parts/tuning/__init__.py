"""Fine-tuning: training examples, the verbs `sft` (supervised) and `dpo` (preferences)."""
