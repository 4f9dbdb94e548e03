"""Files: how they are read, written, named and locked.  These modules import bpe.py alone."""
