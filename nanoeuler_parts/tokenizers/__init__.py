"""Tokenizers of other models: other patterns than GPT-2's, and SentencePiece."""
