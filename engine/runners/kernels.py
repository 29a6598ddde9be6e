"""The arithmetic of the native runner, compiled by numba: one call computes a whole step.

Products of few rows with a large matrix are where BLAS libraries waste a CPU. Here a weight matrix is stored
in panels of NB columns, and one register tile of up to MR rows runs down a panel once: every weight is read
once per MR rows, in order. Few rows wait for memory, so weights stay small: those that come quantised in blocks
of 32 keep their levels as bytes and become exact floats on the way (`pack_blocks`), the others are half floats
(`pack`).

The sum over K always runs from 0 to K-1, one fused multiply-add at a time, whatever the number of rows, so a
row's result does not depend on the batch, to the bit. The same holds for attention, which visits positions in
order.

Measured against OpenBLAS and llama.cpp's kernels in `make bench`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from engine.runners.gguf_file import Blocks

Array = NDArray[np.float32]
Packed = NDArray[np.uint8]

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f"))
VECTOR = 16 if _HAS_AVX512 else 8
"""float32 lanes of one register."""
NB = 2 * VECTOR
"""Columns of a panel: two registers."""
MR = 8 if _HAS_AVX512 else 6
"""Rows of the largest tile: MR x 2 accumulators, two weights and a broadcast fill the register file."""

BLOCK = 32
"""Weights along K that share a scale, in every quantisation that is kept as it is."""
QUERIES = 32
"""Tokens of one row whose attention is computed together: their keys are packed once."""


def pack(weight: Array) -> Packed:
    """A weight [N, K] (rows are outputs) as panels [ceil(N / NB), bytes], zero padded.

    A panel holds half floats [K, NB]. Raises ValueError for weights that halves cannot hold.
    """
    n, k = weight.shape
    panels = -(-n // NB)
    out = np.zeros((panels, k, NB), np.float16)
    with np.errstate(over="ignore"):
        for p in range(panels):
            rows = weight[p * NB : (p + 1) * NB]
            out[p, :, : len(rows)] = rows.T
    if not np.isfinite(out).all():
        raise ValueError(f"a weight of {np.abs(weight).max():g} is beyond half precision")
    return out.view(np.uint8).reshape(panels, -1)


def pack_blocks(blocks: Blocks) -> Packed:
    """A quantised weight [N, K] as panels [ceil(N / NB), bytes], zero padded; nothing is rounded.

    A panel holds, per block of 32 along K: NB scales and NB least values as half floats, then the levels as
    bytes [32, NB].
    """
    n, k = blocks.levels.shape
    panels, count = -(-n // NB), k // BLOCK
    out = np.zeros((panels, count, (BLOCK + 4) * NB), np.uint8)
    edges = np.zeros((2, panels * NB, count), np.float16)
    edges[0, :n], edges[1, :n] = blocks.scales, blocks.leasts
    by_panel = edges.reshape(2, panels, NB, count).transpose(1, 3, 0, 2)
    out[:, :, : 4 * NB] = np.ascontiguousarray(by_panel).view(np.uint8).reshape(panels, count, -1)
    levels = np.zeros((panels * NB, k), np.uint8)
    levels[:n] = blocks.levels
    by_panel_levels = levels.reshape(panels, NB, count, BLOCK).transpose(0, 2, 3, 1)
    out[:, :, 4 * NB :] = by_panel_levels.reshape(panels, count, -1)
    return out.reshape(panels, -1)


def unpack_rows(packed: Packed, k: int, rows: NDArray[Any]) -> Array:
    """Rows [len(rows), K] of a packed weight as float32."""
    panels, columns = packed[rows // NB], rows % NB
    if packed.shape[1] == 2 * k * NB:
        halves = panels.view(np.float16).reshape(len(rows), k, NB)
        return np.take_along_axis(halves, columns[:, None, None], 2)[:, :, 0].astype(np.float32)
    blocks = panels.reshape(len(rows), k // BLOCK, -1)
    edges = blocks[:, :, : 4 * NB].copy().view(np.float16).reshape(len(rows), k // BLOCK, 2, NB)
    scale, least = np.moveaxis(
        np.take_along_axis(edges, columns[:, None, None, None], 3)[..., 0].astype(np.float32), 2, 0
    )
    levels = blocks[:, :, 4 * NB :].reshape(len(rows), k // BLOCK, BLOCK, NB)
    level = np.take_along_axis(levels, columns[:, None, None, None], 3)[..., 0].astype(np.float32)
    return np.ascontiguousarray((level * scale[..., None] + least[..., None]).reshape(len(rows), k))


def _tile(rows: int, adds: bool, stored: str) -> Callable[..., None]:
    """A kernel y[rows, NB] = x[rows, K] @ panel[K, NB] over raw addresses and row strides in floats.

    With `adds`, the sums start from what y holds. `stored` is what the panel holds: "float", "half", or
    "byte" for one block of levels behind its scales and least values.
    """

    @intrinsic
    def tile(_context: Any, x: Any, ldx: Any, w: Any, y: Any, ldy: Any, k: Any) -> Any:
        signature = types.void(
            types.uintp, types.intp, types.uintp, types.uintp, types.intp, types.intp
        )
        return signature, lambda context, builder, _sig, args: _emit(
            context, builder, args, rows, adds, stored
        )

    return tile


def _emit(context: Any, b: Any, args: Any, rows: int, adds: bool, stored: str) -> Any:
    x_address, ldx, w_address, y_address, ldy, k = args
    scalar, index = ir.FloatType(), ir.IntType(64)
    vector, lane = ir.VectorType(scalar, VECTOR), ir.IntType(32)
    pointer = scalar.as_pointer()
    half_float = ir.HalfType()
    item = {"float": scalar, "half": half_float, "byte": ir.IntType(8)}[stored]
    x, y = (b.inttoptr(address, pointer) for address in (x_address, y_address))
    w = b.inttoptr(w_address, item.as_pointer())

    def at(base: Any, offset: Any) -> Any:
        return b.gep(base, [offset])

    def const(value: int) -> Any:
        return ir.Constant(index, value)

    def load_vector(kind: Any, base: Any, offset: int, align: int) -> Any:
        place = b.bitcast(at(base, const(offset)), ir.VectorType(kind, VECTOR).as_pointer())
        return b.load(place, align=align)

    def sums_at(row: int, half: int) -> Any:
        offset = b.add(b.mul(ldy, const(row)), const(half * VECTOR))
        return b.bitcast(at(y, offset), vector.as_pointer())

    fused: Any = ("contract",)  # multiply and add may become one instruction, and do in every tile
    zero = ir.Constant(vector, [0.0] * VECTOR)
    start = [[zero, zero] for _ in range(rows)]
    if adds:
        start = [[b.load(sums_at(row, half), align=4) for half in range(2)] for row in range(rows)]
    scales, leasts = [], []
    if stored == "byte":
        edges = b.inttoptr(w_address, half_float.as_pointer())
        for half in range(2):
            scales.append(b.fpext(load_vector(half_float, edges, half * VECTOR, 2), vector))
            leasts.append(b.fpext(load_vector(half_float, edges, NB + half * VECTOR, 2), vector))
        w = at(w, const(4 * NB))
    before = b.block
    loop, done = b.append_basic_block("tile"), b.append_basic_block("tile.done")
    b.cbranch(b.icmp_signed(">", k, const(0)), loop, done)
    b.position_at_end(loop)
    i = b.phi(index)
    i.add_incoming(const(0), before)
    sums = [[b.phi(vector) for _ in range(2)] for _ in range(rows)]
    for row in range(rows):
        for half in range(2):
            sums[row][half].add_incoming(start[row][half], before)
    panel, weights = at(w, b.mul(i, const(NB))), []
    for half in range(2):
        load = load_vector(item, panel, half * VECTOR, {"float": 4, "half": 2, "byte": 1}[stored])
        if stored == "half":
            load = b.fpext(load, vector)
        elif stored == "byte":
            level = b.uitofp(b.zext(load, ir.VectorType(lane, VECTOR)), vector)
            load = b.fadd(b.fmul(level, scales[half], flags=fused), leasts[half], flags=fused)
        weights.append(load)
    undefined = ir.Constant(vector, ir.Undefined)
    spread = ir.Constant(ir.VectorType(lane, VECTOR), [0] * VECTOR)
    updated = []
    for row in range(rows):
        value = b.load(at(x, b.add(b.mul(ldx, const(row)), i)))
        value = b.insert_element(undefined, value, ir.Constant(lane, 0))
        value = b.shuffle_vector(value, undefined, spread)
        updated.append(
            [
                b.fadd(b.fmul(value, weights[half], flags=fused), sums[row][half], flags=fused)
                for half in range(2)
            ]
        )
    following = b.add(i, const(1))
    i.add_incoming(following, loop)
    for row in range(rows):
        for half in range(2):
            sums[row][half].add_incoming(updated[row][half], loop)
    b.cbranch(b.icmp_signed("<", following, k), loop, done)
    b.position_at_end(done)
    for row in range(rows):
        for half in range(2):
            total = b.phi(vector)
            total.add_incoming(start[row][half], before)
            total.add_incoming(updated[row][half], loop)
            # phis must lead their block: the stores follow once all exist
            sums[row][half] = total
    for row in range(rows):
        for half in range(2):
            b.store(sums[row][half], sums_at(row, half), align=4)
    return context.get_dummy_value()


def _panel_with(adds: bool, stored: str) -> Callable[..., None]:
    largest = _tile(MR, adds, stored)
    tile4, tile3, tile2, tile1 = (_tile(rows, adds, stored) for rows in (4, 3, 2, 1))

    @njit(nogil=True)
    def panel(x: int, ldx: int, k: int, w: int, y: int, ldy: int, m: int) -> None:
        """y[m, NB] (+)= x[m, k] @ one panel, tile by tile; addresses in bytes, strides in floats."""
        row = 0
        while row + MR <= m:
            largest(x + row * ldx * 4, ldx, w, y + row * ldy * 4, ldy, k)
            row += MR
        if row + 4 <= m:
            tile4(x + row * ldx * 4, ldx, w, y + row * ldy * 4, ldy, k)
            row += 4
        if row + 3 <= m:
            tile3(x + row * ldx * 4, ldx, w, y + row * ldy * 4, ldy, k)
        elif row + 2 <= m:
            tile2(x + row * ldx * 4, ldx, w, y + row * ldy * 4, ldy, k)
        elif row < m:
            tile1(x + row * ldx * 4, ldx, w, y + row * ldy * 4, ldy, k)

    return panel


_floats, _floats_add = _panel_with(False, "float"), _panel_with(True, "float")
_halves = _panel_with(False, "half")
_bytes, _bytes_add = _panel_with(False, "byte"), _panel_with(True, "byte")

# The functions below take arrays with offsets in items: an address alone would not keep its array alive.


@njit(nogil=True)
def _scores(xs: Array, ldx: int, k: int, ws: Any, w0: int, ys: Array, y0: int, m: int) -> None:
    """y = x @ one panel of floats, y beside others in rows of ys."""
    w, y = ws.ctypes.data + w0 * 4, ys.ctypes.data + y0 * 4
    _floats(xs.ctypes.data, ldx, k, w, y, ys.shape[1], m)


@njit(nogil=True)
def _weigh(xs: Array, x0: int, k: int, ws: Any, w0: int, ys: Array, y0: int, m: int) -> None:
    """y += x @ one panel of floats; x a part of the rows of xs."""
    x, w, y = xs.ctypes.data + x0 * 4, ws.ctypes.data + w0 * 4, ys.ctypes.data + y0 * 4
    _floats_add(x, xs.shape[1], k, w, y, ys.shape[1], m)


@njit(nogil=True)
def _panel(xs: Array, ws: Packed, w0: int, size: int, ys: Array, y0: int) -> None:
    """y = x @ the panel of `size` bytes at byte w0, y beside others in rows of ys."""
    m, k, ldy = xs.shape[0], xs.shape[1], ys.shape[1]
    x, w, y = xs.ctypes.data, ws.ctypes.data + w0, ys.ctypes.data + y0 * 4
    if size == 2 * k * NB:
        _halves(x, k, k, w, y, ldy, m)
        return
    # A few rows at a time, so that their sums stay near while the blocks go by.
    for row in range(0, m, MR):
        rows = min(MR, m - row)
        xr, yr = x + row * k * 4, y + row * ldy * 4
        _bytes(xr, k, BLOCK, w, yr, ldy, rows)
        for block in range(1, k // BLOCK):
            at = w + block * (BLOCK + 4) * NB
            _bytes_add(xr + block * BLOCK * 4, k, BLOCK, at, yr, ldy, rows)


@njit(parallel=True, nogil=True, cache=True)
def product(x: Array, w: Packed, y: Array) -> None:
    """y[M, panels * NB] = x[M, K] @ packed w; all C-contiguous."""
    size = w.shape[1]
    for p in prange(w.shape[0]):
        _panel(x, w, p * size, size, y, p * NB)


@njit(nogil=True, cache=True)
def _rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    for row in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0 / np.sqrt(total / x.shape[1] + eps))
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * weight[i]


@njit(nogil=True, cache=True)
def _rotate(vector: Array, cos: Array, sin: Array) -> None:
    """Rotary embedding of one head in place: the two halves are the real and imaginary parts."""
    half = cos.shape[0]
    for i in range(half):
        a, b = vector[i], vector[i + half]
        vector[i] = a * cos[i] - b * sin[i]
        vector[i + half] = b * cos[i] + a * sin[i]


@njit(nogil=True, cache=True, inline="always")
def _exp(x: Any) -> Any:
    """e^x for x <= 0 in float32, to 2 units in the last place, in a form that compilers vectorise.

    Cody and Waite 1980: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; below -87 it is 0.
    """
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    n = max(n, np.float32(-126.0))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691e-4)
    p = p * r + np.float32(1.3981999e-3)
    p = p * r + np.float32(8.3334519e-3)
    p = p * r + np.float32(4.1665795e-2)
    p = p * r + np.float32(1.6666665e-1)
    p = p * r + np.float32(0.5)
    p = p * r * r + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x > np.float32(-87.0) else np.float32(0.0)


@njit(nogil=True, cache=True, inline="always")
def _silu(x: Any) -> Any:
    """x times the logistic function of x, without overflow on either side."""
    e = _exp(-abs(x))
    return x * ((np.float32(1.0) if x > np.float32(0.0) else e) / (np.float32(1.0) + e))


@njit(nogil=True, cache=True)
def _softmax(row: Array, seen: int) -> Any:
    """Turn the first `seen` scores into e^(score - max) and the rest into 0; returns their sum."""
    top = row[0]
    for j in range(1, seen):
        top = max(top, row[j])
    for j in range(seen):
        row[j] = _exp(row[j] - top)
    row[seen:] = np.float32(0.0)
    total = np.float32(0.0)
    for j in range(seen):
        total += row[j]
    return total


@njit(nogil=True, cache=True)
def _attend(
    projected: Array,  # [T, ...]: rotated and scaled queries first
    first: int,
    count: int,  # tokens first .. first + count - 1 of one row
    positions: Any,
    blocks: Any,  # KV block of each NB positions of the row
    keys: Array,  # [blocks, head, NB], of one layer and kv head
    values: Array,  # [blocks, parts, NB, NB]
    kv_head: int,
    group: int,
    mixed: Array,  # [T, heads * head] out
) -> None:
    """Causal attention of a few queries: both products go through the same tiles as the weights.

    Positions behind a query's own are computed and given the share 0, which changes no bit of its sum.
    """
    head, parts = keys.shape[1], values.shape[1]
    panels = positions[first + count - 1] // NB + 1
    m, n = count * group, panels * NB
    queries = np.empty((m, head), np.float32)
    for r in range(m):
        at = (kv_head * group + r % group) * head
        queries[r] = projected[first + r // group, at : at + head]
    shares, sums = np.empty((m, n), np.float32), np.empty(m, np.float32)
    for p in range(panels):
        _scores(queries, head, head, keys, blocks[p] * head * NB, shares, p * NB, m)
    for r in range(m):
        sums[r] = _softmax(shares[r], positions[first + r // group] + 1)
    weighted = np.zeros((m, parts * NB), np.float32)
    for c in range(parts):
        for p in range(panels):
            w = (blocks[p] * parts + c) * NB * NB
            _weigh(shares, p * NB, NB, values, w, weighted, c * NB, m)
    for r in range(m):
        at = (kv_head * group + r % group) * head
        scale = np.float32(1.0) / sums[r]
        for i in range(head):
            mixed[first + r // group, at + i] = weighted[r, i] * scale


@njit(nogil=True, cache=True)
def _query_blocks(rows: Any) -> Any:
    """Cut the batch into (first, count) blocks of at most QUERIES neighbours of one row."""
    out = np.empty((rows.shape[0], 2), np.int64)
    n = 0
    for i in range(rows.shape[0]):
        if i and rows[i] == rows[i - 1] and out[n - 1, 1] < QUERIES:
            out[n - 1, 1] += 1
        else:
            out[n, 0], out[n, 1] = i, 1
            n += 1
    return out[:n]


@njit(parallel=True, nogil=True, cache=True)
def step(
    x: Array,  # [T, D] embeddings in, hidden states out
    positions: Any,  # [T]
    rows: Any,  # [T]
    table: Any,  # [rows, blocks of a row] -> KV block of NB positions
    keys: Array,  # [layers, kv heads, blocks, head, NB]: a block of keys is a panel
    values: Array,  # [layers, kv heads, blocks, ceil(head / NB), NB, NB]: as many panels as the head is wide
    norms: Array,  # [layers, 2, D]
    qkv: Packed,  # [layers, panels, bytes]; so are the others
    qkv_bias: Array,  # [layers, panels * NB]
    out: Packed,
    gate_up: Packed,  # a panel of gate and the same of up behind each other
    down: Packed,
    cos: Array,  # [positions, head / 2]
    sin: Array,
    heads: int,
    ffn: int,
    eps: float,
) -> None:
    """Run every layer over a flat batch, appending its keys and values at the places in `table`."""
    t, d = x.shape
    layers, kv_heads, _, head, _ = keys.shape
    group = heads // kv_heads
    width = heads * head
    normed = np.empty((t, d), np.float32)
    projected = np.empty((t, qkv.shape[1] * NB), np.float32)
    mixed = np.empty((t, width), np.float32)
    hidden = np.empty((t, ffn), np.float32)
    added = np.empty((t, out.shape[1] * NB), np.float32)
    scale = np.float32(1.0 / np.sqrt(head))
    queries = _query_blocks(rows)
    for layer in range(layers):
        _rms_norm(x, norms[layer, 0], eps, normed)
        w, size, n = qkv[layer], qkv.shape[2], projected.shape[1]
        for p in prange(qkv.shape[1]):
            _panel(normed, w, p * size, size, projected, p * NB)
        for i in range(t):
            row = projected[i]
            for j in range(n):
                row[j] += qkv_bias[layer, j]
            block, place = table[rows[i], positions[i] // NB], positions[i] % NB
            for h in range(heads):
                _rotate(row[h * head : (h + 1) * head], cos[positions[i]], sin[positions[i]])
            for j in range(width):
                row[j] *= scale
            for h in range(kv_heads):
                at = width + h * head
                _rotate(row[at : at + head], cos[positions[i]], sin[positions[i]])
                for j in range(head):
                    keys[layer, h, block, j, place] = row[at + j]
                at += kv_heads * head
                for j in range(head):
                    values[layer, h, block, j // NB, place, j % NB] = row[at + j]
        for unit in prange(queries.shape[0] * kv_heads):
            first, h = queries[unit // kv_heads, 0], unit % kv_heads
            _attend(
                projected,
                first,
                queries[unit // kv_heads, 1],
                positions,
                table[rows[first]],
                keys[layer, h],
                values[layer, h],
                h,
                group,
                mixed,
            )
        w, size = out[layer], out.shape[2]
        for p in prange(out.shape[1]):
            _panel(mixed, w, p * size, size, added, p * NB)
        for i in range(t):
            for j in range(d):
                x[i, j] += added[i, j]
        _rms_norm(x, norms[layer, 1], eps, normed)
        w, size = gate_up[layer], gate_up.shape[2] // 2
        for p in prange(gate_up.shape[1]):
            both = np.empty((t, 2 * NB), np.float32)
            _panel(normed, w, 2 * p * size, size, both, 0)
            _panel(normed, w, (2 * p + 1) * size, size, both, NB)
            end = min(NB, ffn - p * NB)
            for i in range(t):
                for j in range(end):
                    g = both[i, j]
                    hidden[i, p * NB + j] = _silu(g) * both[i, NB + j]
        w, size = down[layer], down.shape[2]
        for p in prange(down.shape[1]):
            _panel(hidden, w, p * size, size, added, p * NB)
        for i in range(t):
            for j in range(d):
                x[i, j] += added[i, j]
