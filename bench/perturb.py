"""Starts that differ by rounding: what training makes of it measures every other difference."""


def perturbed(flat, rng, by=1e-7):
    """flat * (1 + by * normal), each number rounded once, in the type of flat."""
    return (flat * (1 + by * rng.standard_normal(flat.size))).astype(flat.dtype)
