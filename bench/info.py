"""What is in a checkpoint: python nanoeuler.py info FILE."""
import nanoeuler as ne


def info(file):
    """Prints its numbers, its settings, where it came from and whether it is whole."""
    c = ne.read_checkpoint(file)
    s = c.state
    ne.print_table(file, [
        ("parameters", f"{ne.n_params(c.cfg):,}"), *ne.asdict(c.cfg).items(), ("kind", s.kind),
        ("step", f"{s.step:,} of {s.n_steps:,}"), ("tokens seen", f"{s.tokens_seen:,}"),
        ("validation", f"{s.bits_per_byte:.4f} bits/byte"),
        ("text", f"{s.options.get('data')}, sha256 {s.text_sha256[:12]}"),
        ("AdamW moments", "yes" if c.moments else "no"),
        ("tokenizer", f"sha256 {c.tokenizer.hash()}"), ("checksum", "matches")])
