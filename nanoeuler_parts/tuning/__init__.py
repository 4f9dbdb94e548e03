"""Fine-tuning: training examples, the verbs `sft` (supervised), `dpo` (preferences) and `rl`
(rewards)."""
