"""The arithmetic of the native runner, compiled by numba: one call computes a whole step.

Products of few rows with a large matrix are where BLAS libraries waste a CPU. Here a weight matrix is stored
in panels of NB columns ([panel][K][NB], see `pack`), and one register tile of up to MR rows runs down a panel
once: every weight is read once per MR rows, in order, as a half float that becomes a float on the way
(rounding to half loses 2^-12 of a weight, its quantisation to 4 bits lost 2^-5; the memory read halves).

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

Array = NDArray[np.float32]
Packed = NDArray[np.uint16]

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f"))
VECTOR = 16 if _HAS_AVX512 else 8
"""float32 lanes of one register."""
NB = 2 * VECTOR
"""Columns of a panel: two registers."""
MR = 8 if _HAS_AVX512 else 6
"""Rows of the largest tile: MR x 2 accumulators, two weights and a broadcast fill the register file."""

QUERIES = 32
"""Tokens of one row whose attention is computed together: their keys are packed once."""


def pack(weight: Array) -> Packed:
    """A weight [N, K] (rows are outputs) as panels [ceil(N / NB), K, NB], zero padded.

    Stored as half floats, seen as their bits. Raises ValueError for weights that halves cannot hold.
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
    return out.view(np.uint16)


def unpack_rows(packed: Packed, rows: NDArray[Any]) -> Array:
    """Rows [len(rows), K] of a packed weight as float32."""
    return np.ascontiguousarray(packed[rows // NB, :, rows % NB].view(np.float16), np.float32)


def _tile(rows: int, adds: bool, is_half: bool) -> Callable[..., None]:
    """A kernel y[rows, NB] = x[rows, K] @ panel[K, NB] over raw addresses and row strides in floats.

    With `adds`, the sums start from what y holds; with `is_half`, the panel holds half floats.
    """

    @intrinsic
    def tile(_context: Any, x: Any, ldx: Any, w: Any, y: Any, ldy: Any, k: Any) -> Any:
        signature = types.void(
            types.uintp, types.intp, types.uintp, types.uintp, types.intp, types.intp
        )
        return signature, lambda context, builder, _sig, args: _emit(
            context, builder, args, rows, adds, is_half
        )

    return tile


def _emit(context: Any, b: Any, args: Any, rows: int, adds: bool, is_half: bool) -> Any:
    x_address, ldx, w_address, y_address, ldy, k = args
    scalar, index = ir.FloatType(), ir.IntType(64)
    vector, lane = ir.VectorType(scalar, VECTOR), ir.IntType(32)
    pointer = scalar.as_pointer()
    stored = ir.HalfType() if is_half else scalar
    stored_vector = ir.VectorType(stored, VECTOR)
    x, y = (b.inttoptr(address, pointer) for address in (x_address, y_address))
    w = b.inttoptr(w_address, stored.as_pointer())

    def at(base: Any, offset: Any) -> Any:
        return b.gep(base, [offset])

    def const(value: int) -> Any:
        return ir.Constant(index, value)

    def sums_at(row: int, half: int) -> Any:
        offset = b.add(b.mul(ldy, const(row)), const(half * VECTOR))
        return b.bitcast(at(y, offset), vector.as_pointer())

    zero = ir.Constant(vector, [0.0] * VECTOR)
    start = [[zero, zero] for _ in range(rows)]
    if adds:
        start = [[b.load(sums_at(row, half), align=4) for half in range(2)] for row in range(rows)]
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
        place = b.bitcast(at(panel, const(half * VECTOR)), stored_vector.as_pointer())
        load = b.load(place, align=2 if is_half else 4)
        if is_half:
            load = b.fpext(load, vector)
        weights.append(load)
    undefined = ir.Constant(vector, ir.Undefined)
    spread = ir.Constant(ir.VectorType(lane, VECTOR), [0] * VECTOR)
    fused: Any = ("contract",)  # multiply and add may become one instruction, and do in every tile
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


def _panel_with(adds: bool, is_half: bool) -> Callable[..., None]:
    largest = _tile(MR, adds, is_half)
    tile4, tile3, tile2, tile1 = (_tile(rows, adds, is_half) for rows in (4, 3, 2, 1))
    item = 2 if is_half else 4

    @njit(nogil=True)
    def panel(
        xs: Array,
        x0: int,
        ldx: int,
        k: int,
        ws: Array,
        w0: int,
        ys: Array,
        y0: int,
        ldy: int,
        m: int,
    ) -> None:
        """y[m, NB] (+)= x[m, k] @ one panel, tile by tile.

        Arrays with offsets and strides in floats: an address alone would not keep its array alive.
        """
        x, w, y = xs.ctypes.data + x0 * 4, ws.ctypes.data + w0 * item, ys.ctypes.data + y0 * 4
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


_panel = _panel_with(adds=False, is_half=True)
_panel_keys, _panel_values = _panel_with(False, False), _panel_with(True, False)


@njit(parallel=True, nogil=True, cache=True)
def product(x: Array, w: Packed, y: Array) -> None:
    """y[M, panels * NB] = x[M, K] @ packed w; all C-contiguous float32."""
    m, k, n = x.shape[0], x.shape[1], y.shape[1]
    for p in prange(w.shape[0]):
        _panel(x, 0, k, k, w, p * k * NB, y, p * NB, n, m)


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
        _panel_keys(queries, 0, head, head, keys, blocks[p] * head * NB, shares, p * NB, n, m)
    for r in range(m):
        sums[r] = _softmax(shares[r], positions[first + r // group] + 1)
    weighted = np.zeros((m, parts * NB), np.float32)
    for c in range(parts):
        for p in range(panels):
            w = (blocks[p] * parts + c) * NB * NB
            _panel_values(shares, p * NB, n, NB, values, w, weighted, c * NB, parts * NB, m)
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
    qkv: Packed,  # [layers, panels, D, NB]
    qkv_bias: Array,  # [layers, panels * NB]
    out: Packed,  # [layers, panels, heads * head, NB]
    gate_up: Packed,  # [layers, panels, D, 2 NB]: NB columns of gate beside NB columns of up
    down: Packed,  # [layers, panels, F, NB]
    cos: Array,  # [positions, head / 2]
    sin: Array,
    heads: int,
    eps: float,
) -> None:
    """Run every layer over a flat batch, appending its keys and values at the places in `table`."""
    t, d = x.shape
    layers, kv_heads, _, head, _ = keys.shape
    group = heads // kv_heads
    width = heads * head
    ffn = down.shape[2]
    normed = np.empty((t, d), np.float32)
    projected = np.empty((t, qkv.shape[1] * NB), np.float32)
    mixed = np.empty((t, width), np.float32)
    hidden = np.empty((t, ffn), np.float32)
    added = np.empty((t, out.shape[1] * NB), np.float32)
    scale = np.float32(1.0 / np.sqrt(head))
    queries = _query_blocks(rows)
    for layer in range(layers):
        _rms_norm(x, norms[layer, 0], eps, normed)
        w, n = qkv[layer], projected.shape[1]
        for p in prange(qkv.shape[1]):
            _panel(normed, 0, d, d, w, p * d * NB, projected, p * NB, n, t)
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
        w, n = out[layer], added.shape[1]
        for p in prange(out.shape[1]):
            _panel(mixed, 0, width, width, w, p * width * NB, added, p * NB, n, t)
        for i in range(t):
            for j in range(d):
                x[i, j] += added[i, j]
        _rms_norm(x, norms[layer, 1], eps, normed)
        w = gate_up[layer]
        for p in prange(gate_up.shape[1]):
            both = np.empty((t, 2 * NB), np.float32)
            _panel(normed, 0, d, d, w, 2 * p * d * NB, both, 0, 2 * NB, t)
            _panel(normed, 0, d, d, w, (2 * p + 1) * d * NB, both, NB, 2 * NB, t)
            end = min(NB, ffn - p * NB)
            for i in range(t):
                for j in range(end):
                    g = both[i, j]
                    hidden[i, p * NB + j] = _silu(g) * both[i, NB + j]
        w = down[layer]
        for p in prange(down.shape[1]):
            _panel(hidden, 0, ffn, ffn, w, p * ffn * NB, added, p * NB, n, t)
        for i in range(t):
            for j in range(d):
                x[i, j] += added[i, j]
