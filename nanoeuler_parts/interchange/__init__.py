"""Models in other formats: Hugging Face, GGUF and int8.  Chat templates of imported models."""
