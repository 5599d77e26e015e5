"""Makes the goldens of GGUF's blocks: bytes of every type that is read, and the weights they stand for.

    python tools/oracle/gguf_goldens.py

Written from the layouts of the blocks alone, in numpy. Every weight is computed exactly, in double precision, and
rounded once. For every type a file with the bytes of its blocks (.blocks) and one with the weights as f32 (.f32).
"""

from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parents[2] / "crates/forebay-hub/tests/goldens/gguf"
BLOCKS = 5


def half(raw):
    """Two bytes of every block as a half-precision number, one column."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float64)


def q8_0(raw):
    return half(raw[:, :2]) * np.ascontiguousarray(raw[:, 2:]).view(np.int8)


def q4_0(raw):
    codes = raw[:, 2:]
    return half(raw[:, :2]) * (np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float64) - 8)


def q4_k(raw):
    blocks = len(raw)
    packed = raw[:, 4:16].astype(np.int64)
    # Read as one number of 96 bits: bytes 0-3 hold the scales 0-3 and the high bits of the scales 4-7, bytes 4-7 the
    # minima likewise, bytes 8-11 the low nibbles of scales (low) and minima (high) 4-7.
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([a % 64, c % 16 + 16 * (a // 64)], axis=1)
    least = np.concatenate([b % 64, c // 16 + 16 * (b // 64)], axis=1)
    codes = raw[:, 16:].reshape(blocks, 4, 32)
    codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(blocks, 8, 32)
    values = half(raw[:, 0:2])[:, :, None] * scale[:, :, None] * codes
    return (values - half(raw[:, 2:4])[:, :, None] * least[:, :, None]).reshape(blocks, 256)


def q6_k(raw):
    blocks = len(raw)
    low = raw[:, :128].reshape(blocks, 2, 64)
    high = raw[:, 128:192].reshape(blocks, 2, 32)
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float64)
    # Of every half of the block: 128 low nibbles, the low ones of 64 bytes first, and 4 runs of 32 pairs of bits.
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (nibbles + 16 * pairs).astype(np.float64).reshape(blocks, 256) - 32
    return half(raw[:, 208:210]) * np.repeat(scales, 16, axis=1) * codes


# Decoder, bytes of a block, where half-precision numbers lie in it.
BLOCK_TYPES = {
    "Q8_0": (q8_0, 34, [0]),
    "Q4_0": (q4_0, 18, [0]),
    "Q4_K": (q4_k, 144, [0, 2]),
    "Q6_K": (q6_k, 210, [208]),
}
# Factors that are exact, large, small, below the normal range, negative, zero.
FACTORS = np.array([0.0625, 0.0173, 3.1e-5, 6e-7, -0.0421], dtype="<f2")


def main():
    rng = np.random.default_rng(20)
    OUT.mkdir(parents=True, exist_ok=True)
    for name, (decode, size, places) in BLOCK_TYPES.items():
        raw = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        for at in places:
            raw[:, at : at + 2] = np.roll(FACTORS, at).view(np.uint8).reshape(BLOCKS, 2)
        save(name, raw.tobytes(), decode(raw))
    bits = rng.integers(0, 1 << 16, 64).astype("<u2")
    halves = np.append(bits[np.isfinite(bits.view("<f2"))], np.array([0, 1, 0x3FF, 0x400, 0x7BFF, 0x8001], "<u2"))
    save("F16", halves.astype("<u2").tobytes(), halves.astype("<u2").view("<f2"))
    bits = np.append(bits[bits & 0x7F80 != 0x7F80], np.array([0, 1, 0x7F7F, 0x8001], "<u2")).astype("<u2")
    save("BF16", bits.tobytes(), (bits.astype("<u4") << 16).view("<f4"))


def save(name, raw, weights):
    (OUT / f"{name}.blocks").write_bytes(raw)
    (OUT / f"{name}.f32").write_bytes(weights.astype("<f4").tobytes())


if __name__ == "__main__":
    main()
