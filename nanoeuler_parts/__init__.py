"""Everything that NanoEuler needs besides the model, its training and the chat.

    files/         safetensors, atomic writes, logs and locks, training texts and token files

nanoeuler.py and nanoeuler_cuda.py are the programs.  They import these modules; a reader who wants
to understand the model needs none of them.
"""
