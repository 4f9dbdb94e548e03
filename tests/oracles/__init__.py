"""Independent implementations that tests and benchmarks hold the programs against.

naive             the model, its gradient and AdamW in plain NumPy, float64
torch_peer        the model in PyTorch, with autograd
torch_engine      that model as an Engine, which whole runs train, and its greedy decoder
torch_llama       a Llama with the parts of Mistral, Qwen2 and Qwen3
naive_attention   attention with T x T matrices, in kernels for the GPU
"""
