"""PPMd on the text of page 3: a compressor that counts bytes, which page 3 quotes.

    pip install pyppmd
    python bench/tour/ppmd.py [--order 5]        bits per byte of the held-out tenth of Shakespeare

Variant H (Shkarin 2002) counts which byte followed the last `order` bytes, and mixes shorter runs.
It reads the first nine tenths, then the tail: all of it, or each 64 KB of it without the others.
"""
import argparse
import pathlib

TEXT = pathlib.Path(__file__).resolve().parent.parent.parent / "data/shakespeare.txt"
MEMORY = 1 << 30             # bytes for the counts: more than they need
PIECE = 1 << 16              # bytes


def size(text, order):
    """Bytes of the compressed text"""
    import pyppmd
    encoder = pyppmd.Ppmd7Encoder(order, MEMORY)
    return len(encoder.encode(text)) + len(encoder.flush())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--order", type=int, default=6, help="bytes that are looked back")
    order, text = parser.parse_args().order, TEXT.read_bytes()
    seen, tail = text[:len(text) * 9 // 10], text[len(text) * 9 // 10:]
    before = size(seen, order)
    print(f"the whole tail: {8 * (size(text, order) - before) / len(tail):.4f} bits per byte")
    pieces = [tail[i:i + PIECE] for i in range(0, len(tail), PIECE)]
    total = sum(size(seen + piece, order) - before for piece in pieces)
    print(f"each {PIECE >> 10} KB alone: {8 * total / len(tail):.4f} bits per byte")


if __name__ == "__main__":
    main()
