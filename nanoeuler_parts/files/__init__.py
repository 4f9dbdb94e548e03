"""Reading, writing, naming and locking of files.  These modules import only bpe.py and each other.

    logs.py          the log of a run, and the locks between runs
    safetensors.py   the container of checkpoints and token files
    texts.py         training texts, and their token ids
    writing.py       files that are replaced as a whole
"""
