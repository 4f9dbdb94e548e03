"""Models in other formats: Hugging Face, GGUF, int8, and the chat templates of other models."""
