"""Reads and writes weight files: safetensors, the quantised `<name>` + `<name>.qs` pairs, and FP8 blocks.

Written from the container description alone, in numpy, so that a mistake in the engine's own reader or quantiser cannot
hide here. `python container.py` checks the vectors of that description.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

F32 = np.float32
# Rank of a dtype in a file. The reference converter writes F32 before U8; the others never meet them in one of its files.
DTYPE_ORDER = {"F32": 0, "BF16": 1, "F16": 2, "F8_E4M3": 3, "U8": 4}
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
FP8_BLOCK = 128


@dataclass
class Stored:
    """One tensor as it lies in a file: the safetensors dtype, the shape, the bytes."""

    dtype: str
    shape: tuple
    data: bytes


# ---- safetensors -----------------------------------------------------------------------------------------------------


def write_safetensors(path, tensors, metadata=None):
    """Writes `tensors` (name -> Stored) sorted by dtype, then bytewise by name, as the reference converter does."""
    items = sorted(tensors.items(), key=lambda kv: (DTYPE_ORDER[kv[1].dtype], kv[0].encode()))
    header, offset = ({"__metadata__": metadata} if metadata else {}), 0
    for name, t in items:
        assert len(t.data) == int(np.prod(t.shape, dtype=np.int64)) * DTYPE_BYTES[t.dtype], name
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + len(t.data)]}
        offset += len(t.data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(head)))
        f.write(head)
        for _, t in items:
            f.write(t.data)


def read_directory(directory):
    """name -> Stored for every `*.safetensors` of a directory; a name must not occur twice."""
    out = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        raw = path.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        for name, e in json.loads(raw[8 : 8 + n]).items():
            if name == "__metadata__":
                continue
            if name in out:
                raise ValueError(f"{name} occurs twice in {directory}")
            a, b = e["data_offsets"]
            out[name] = Stored(e["dtype"], tuple(e["shape"]), raw[8 + n + a : 8 + n + b])
    return out


# ---- plain dtypes ----------------------------------------------------------------------------------------------------


def to_bf16(w):
    """f32 -> the bits of bf16, ties to even. Finite input only."""
    u = np.ascontiguousarray(w, F32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def store_plain(w, dtype):
    w = np.ascontiguousarray(w, F32)
    bits = {"F32": lambda: w, "BF16": lambda: to_bf16(w), "F16": lambda: w.astype(np.float16)}[dtype]()
    return Stored(dtype, w.shape, bits.tobytes())


def load_plain(t):
    if t.dtype == "F32":
        w = np.frombuffer(t.data, F32)
    elif t.dtype == "F16":
        w = np.frombuffer(t.data, np.float16).astype(F32)
    elif t.dtype == "BF16":
        w = (np.frombuffer(t.data, np.uint16).astype(np.uint32) << 16).view(F32)
    else:
        raise ValueError(f"{t.dtype} is not a plain dtype")
    return w.reshape(t.shape).copy()


# ---- quantised pairs -------------------------------------------------------------------------------------------------


def quantise_codes(w, bits, group=None):
    """[O, I] f32 -> signed codes [O, I] and scales [O] or, with groups, [O, ceil(I/group)]."""
    w = np.asarray(w, F32)
    o, i = w.shape
    g = group or i
    padded = np.zeros((o, -(-i // g) * g), F32)
    padded[:, :i] = w
    blocks = padded.reshape(o, -1, g)
    qmax = F32(2 ** (bits - 1) - 1)
    low = {8: -128, 4: -8, 2: -2}[bits]
    scale = np.maximum(np.abs(blocks).max(2) / qmax, F32(1e-8)).astype(F32)
    codes = np.clip(np.rint(blocks / scale[:, :, None]), low, qmax).astype(np.int8)
    return codes.reshape(o, -1)[:, :i], scale if group else scale[:, 0]


def pack(codes, bits, padding=0):
    """Signed codes [O, I] -> payload bytes. `padding` fills the unused high bits of a row's last byte."""
    o, i = codes.shape
    if bits == 8:
        return codes.astype(np.int8).tobytes()
    per_byte = 8 // bits
    stride = -(-i // per_byte)
    fill = padding & (2**bits - 1)
    fields = np.full((o, stride * per_byte), fill, np.uint8)
    fields[:, :i] = (codes.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    out = np.zeros((o, stride), np.uint8)
    for k in range(per_byte):
        out |= fields[:, k::per_byte] << np.uint8(bits * k)
    return out.tobytes()


def unpack(payload, bits, o, i):
    raw = np.frombuffer(payload, np.uint8)
    if bits == 8:
        return raw.view(np.int8).reshape(o, i)
    per_byte = 8 // bits
    raw = raw.reshape(o, -1)
    fields = np.stack([(raw >> np.uint8(bits * k)) & np.uint8(2**bits - 1) for k in range(per_byte)], 2)
    return fields.reshape(o, -1)[:, :i].astype(np.int8) - np.int8(2 ** (bits - 1))


def detect(payload_bytes, scale_count, o, i):
    """(bits, group or None) from byte counts, as a reader has to find them out: the smallest matching group wins."""
    if payload_bytes == o * i:
        bits = 8
    elif payload_bytes == o * -(-i // 2):
        bits = 4
    elif payload_bytes == o * -(-i // 4):
        bits = 2
    else:
        raise ValueError(f"{payload_bytes} payload bytes fit no format of [{o}, {i}]")
    if scale_count == o:
        return bits, None
    if bits == 4:
        for g in GROUP_SIZES:
            if g > i:
                break
            if scale_count == o * -(-i // g):
                return 4, g
    raise ValueError(f"{scale_count} scales fit no {bits}-bit format of [{o}, {i}]")


def dequantise(payload, scales, o, i):
    scales = np.frombuffer(scales, F32)
    bits, group = detect(len(payload), scales.size, o, i)
    codes = unpack(payload, bits, o, i).astype(F32)
    if group is None:
        return codes * scales[:, None]
    return codes * np.repeat(scales.reshape(o, -1), group, 1)[:, :i]


def store_quantised(name, w, bits, group=None, padding=0, low_every=0):
    """The pair for one matrix. `low_every` = n sets every n-th code to the lowest one, which rounding never yields
    but a reader must decode. The weights that count are the ones read back, not `w`."""
    codes, scales = quantise_codes(w, bits, group)
    if low_every:
        codes = codes.copy()
        codes.reshape(-1)[::low_every] = {8: -128, 4: -8, 2: -2}[bits]
    payload = pack(codes, bits, padding)
    return {
        name: Stored("U8", (len(payload),), payload),
        name + ".qs": Stored("F32", (scales.size,), scales.astype(F32).tobytes()),
    }


# ---- FP8 E4M3 with 128 x 128 blocks ----------------------------------------------------------------------------------


def e4m3_table():
    """The value of each of the 256 codes: bias 7, subnormals, no infinity, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value).astype(F32)


def e4m3_encode(w):
    """Nearest code, ties to the even code. |w| <= 448."""
    grid = e4m3_table()[:127]
    mag = np.abs(w)
    hi = np.clip(np.searchsorted(grid, mag), 1, 126)
    below, above = mag - grid[hi - 1], grid[hi] - mag
    code = np.where((below < above) | ((below == above) & ((hi - 1) % 2 == 0)), hi - 1, hi)
    return (code | np.where(np.signbit(w), 0x80, 0)).astype(np.uint8)


def _spread_blocks(scale_inv, o, i):
    return np.repeat(np.repeat(scale_inv, FP8_BLOCK, 0), FP8_BLOCK, 1)[:o, :i]


def store_fp8(name, w):
    o, i = w.shape
    rows, cols = -(-o // FP8_BLOCK), -(-i // FP8_BLOCK)
    scale = np.zeros((rows, cols), F32)
    for r in range(rows):
        for c in range(cols):
            block = w[r * FP8_BLOCK : (r + 1) * FP8_BLOCK, c * FP8_BLOCK : (c + 1) * FP8_BLOCK]
            scale[r, c] = np.abs(block).max() / F32(448)
    codes = e4m3_encode(np.clip(w / _spread_blocks(scale, o, i), -448, 448))
    return {
        name: Stored("F8_E4M3", (o, i), codes.tobytes()),
        name + "_scale_inv": Stored("F32", scale.shape, scale.tobytes()),
    }


# ---- one weight, whatever its storage --------------------------------------------------------------------------------


def load_weight(tensors, name, shape):
    """The f32 values of weight `name`, whose logical `shape` comes from its role, never from a packed payload."""
    t = tensors[name]
    if name + ".qs" in tensors:
        return dequantise(t.data, tensors[name + ".qs"].data, *shape)
    if t.shape != tuple(shape):
        raise ValueError(f"{name}: stored {t.shape}, expected {tuple(shape)}")
    if t.dtype == "F8_E4M3":
        scale = load_plain(tensors[name + "_scale_inv"])
        return e4m3_table()[np.frombuffer(t.data, np.uint8)].reshape(shape) * _spread_blocks(scale, *shape)
    return load_plain(t)


def self_check():
    w = np.array([[0.875, -0.875, 0.4375, 0.0625, -0.1875]], F32)
    codes, scale = quantise_codes(w, 4)
    assert pack(codes, 4) == bytes.fromhex("1f8c06") and pack(codes, 4, padding=8)[2] == 0x86
    assert np.array_equal(dequantise(pack(codes, 4), scale.tobytes(), 1, 5)[0], F32([0.875, -0.875, 0.5, 0, -0.25]))
    codes, scale = quantise_codes(w, 2)
    assert scale[0] == F32(0.875) and codes.tolist() == [[1, -1, 0, 0, 0]]
    assert pack(codes, 2)[0] == 0xA7 and pack(codes, 2)[1] & 3 == 2
    assert pack(quantise_codes(np.array([[1, -1, 0.25]], F32), 8)[0], 8) == bytes.fromhex("7f8120")
    assert pack(quantise_codes(np.array([[0.7, -0.3, 0.2, 0.1, -0.7]], F32), 4)[0], 4) == bytes.fromhex("5f9a01")
    for o, i, scale_bytes, want in (
        (2, 64, 32, 16), (2, 64, 16, 32), (2, 64, 8, None), (3, 65, 60, 16), (3, 65, 24, 48), (1, 200, 20, 48),
        (1, 200, 16, 64), (1, 200, 8, 128), (1, 200, 4, None), (1, 100, 8, 64), (1, 31, 8, 16), (4, 2048, 688, 48),
        (2048, 6144, 393216, 128),
    ):  # fmt: skip
        assert detect(o * -(-i // 2), scale_bytes // 4, o, i) == (4, want), (o, i, scale_bytes)
    ones = dequantise(bytes([0x99] * 10), np.array([0.5, 2], F32).tobytes(), 1, 20)
    assert ones.sum() == 16
    assert [detect(n, 3, 3, 5)[0] for n in (15, 9, 6)] == [8, 4, 2]
    try:
        detect(10, 3, 3, 5)
    except ValueError:
        pass
    else:
        raise AssertionError("10 bytes must fit nothing")
    assert unpack(bytes.fromhex("9807700f"), 4, 2, 3).tolist() == [[0, 1, -1], [-8, -1, 7]]
    table = e4m3_table()
    assert table[0x38] == 1 and table[0x7E] == 448 and table[0xB8] == -1 and table[1] == F32(2.0**-9)
    finite = ~np.isnan(table)
    back = e4m3_encode(table[finite])
    assert np.array_equal(table[back], table[finite])
    pair = store_fp8("x", np.random.default_rng(0).normal(size=(130, 260)).astype(F32))
    assert pair["x_scale_inv"].shape == (2, 3)


if __name__ == "__main__":
    self_check()
    print("container.py: all vectors agree")
