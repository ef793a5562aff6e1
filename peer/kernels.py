"""Layers shaped like Llama's as loops that numba compiles for the machine they run on.

Decoding on a CPU reads every weight for each turn, so the memory's pace is the limit; torch stays below it where
matrices are thin, for what lies between two products starts cold and takes as long as they do. Here a pass of few
tokens is one call: weights stream by once for all of them, a gate is applied where its rows were made, and Python isn't
asked between. Of passes of many tokens, whose products are torch's, only what is done to each token's row is here.

Weights and KV come as addresses (`compiled.py` takes them from the model's own tensors, without copies). What is
bfloat16 lies in memory as such and is widened as it is read; all that is computed between is float32. So a model that
computes in float32 may have its weights in bfloat16. What differs by dtype is chosen by numba as it compiles
(`overload`): numpy's float32, or uint16 for bfloat16, which numpy doesn't have.

Tables of addresses hold 0 for what a model doesn't have. No bounds are checked here: whoever calls vouches for them.
"""

from __future__ import annotations

import math

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, config, njit, prange, types
from numba.extending import intrinsic, overload

HAS_AMX = bool(llvm.get_host_cpu_features().get("amx-bf16"))
# Vectors of 512 bits where they cost no clock. LLVM avoids them on all of Intel's processors; on those since
# AVX512-FP16 sixteen sessions took three quarters of the time with them. Counts for what is compiled after it.
if llvm.get_host_cpu_features().get("avx512fp16") and not (config.CPU_NAME or config.CPU_FEATURES):
    config.CPU_NAME = llvm.get_host_cpu_name()
    config.CPU_FEATURES = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"

# Sums may be reordered, or they would not be vectorised; that there are NaN and Inf is still respected.
LOOPS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
BLOCK = 64  # keys that are in the nearest cache while all queries look at them
TILE = 4  # rows of a matrix that share what is read of the tokens
LEAST_EXPONENT, MOST_EXPONENT = np.float32(-87.3), np.float32(88.3)  # of exp in float32
ZERO, ONE = np.float32(0), np.float32(1)
LOG2_E = np.float32(1.44269504)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
HALF_BITS, HIGH_HALF = np.uint32(16), np.uint32(0xFFFF0000)


@intrinsic
def _pointer(context, address):
    def make(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), make


# ---------------------------------------------------------------- numbers


@njit
def _low(pair):
    """The first of two bfloat16 in 32 bits of a little-endian machine, as float32."""
    return np.uint32(pair << HALF_BITS).view(np.float32)


@njit
def _high(pair):
    return np.uint32(pair & HIGH_HALF).view(np.float32)


@njit
def _rounded(value):
    """To the nearest bfloat16, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> HALF_BITS) & np.uint32(1))
    up = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    return np.uint16(up >> HALF_BITS) if value == value else np.uint16(0x7FC0)


def _wide(stored):
    """A number as it is stored, as float32."""


def _narrow(value, stored):
    """The reverse, as `stored` is."""


def _is_bfloat16(dtype):
    return dtype == types.uint16


@overload(_wide)
def _(stored):
    return (lambda stored: _low(np.uint32(stored))) if _is_bfloat16(stored) else (lambda stored: stored)


@overload(_narrow)
def _(value, stored):
    if _is_bfloat16(stored):
        return lambda value, stored: _rounded(value)
    return lambda value, stored: value


@njit(**LOOPS)
def _exp(x):
    """Cephes' expf (error under 2e-7 of the value), which LLVM can vectorise."""
    x = LEAST_EXPONENT if x < LEAST_EXPONENT else x  # so written, NaN stays NaN
    x = MOST_EXPONENT if x > MOST_EXPONENT else x
    n = np.float32(math.floor(x * LOG2_E + np.float32(0.5)))
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.uint32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + ONE) * power


@njit
def _floats(address, count):
    return carray(_pointer(address), (count,), np.float32)


@njit
def _array_at(dtype, address, rows, width):
    """[rows, width] at an address."""
    return carray(_pointer(address), (rows, width), dtype)


# ---------------------------------------------------------------- products


@njit(**LOOPS)
def _rows_float32(address, n, x, y, start, stop, add):
    """Of the matrix [n, k] at `address` its rows [start, stop): y[:, those] = or += the product with x: [m, k]."""
    m, k = x.shape
    w = carray(_pointer(address), (n, k), np.float32)
    tiled, paired = start + (stop - start) // TILE * TILE, m - m % 2
    for r in range(start, tiled, TILE):
        for j in range(0, paired, 2):
            a0, a1, a2, a3, b0, b1, b2, b3 = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
            for i in range(k):
                p, q = x[j, i], x[j + 1, i]
                a0 += w[r, i] * p
                a1 += w[r + 1, i] * p
                a2 += w[r + 2, i] * p
                a3 += w[r + 3, i] * p
                b0 += w[r, i] * q
                b1 += w[r + 1, i] * q
                b2 += w[r + 2, i] * q
                b3 += w[r + 3, i] * q
            _put(y, j, r, a0, a1, a2, a3, add)
            _put(y, j + 1, r, b0, b1, b2, b3, add)
        for j in range(paired, m):
            a0, a1, a2, a3 = ZERO, ZERO, ZERO, ZERO
            for i in range(k):
                p = x[j, i]
                a0 += w[r, i] * p
                a1 += w[r + 1, i] * p
                a2 += w[r + 2, i] * p
                a3 += w[r + 3, i] * p
            _put(y, j, r, a0, a1, a2, a3, add)
    for r in range(tiled, stop):
        for j in range(m):
            a0 = ZERO
            for i in range(k):
                a0 += w[r, i] * x[j, i]
            y[j, r] = y[j, r] + a0 if add else a0


@njit(**LOOPS)
def _rows_bfloat16(address, n, x, y, start, stop, add):
    """As `_rows_float32`. x: of each row first those at even places, then those at odd ones, as `_split` gives them: so
    two weights are read as one number, and no lane is moved."""
    m, k = x.shape[0], x.shape[1] // 2
    w = carray(_pointer(address), (n, k), np.uint32)
    tiled, paired = start + (stop - start) // TILE * TILE, m - m % 2
    for r in range(start, tiled, TILE):
        for j in range(0, paired, 2):
            a0, a1, a2, a3, b0, b1, b2, b3 = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
            for i in range(k):
                p, q = x[j, i], x[j, k + i]
                s, t = x[j + 1, i], x[j + 1, k + i]
                a0 += _low(w[r, i]) * p + _high(w[r, i]) * q
                a1 += _low(w[r + 1, i]) * p + _high(w[r + 1, i]) * q
                a2 += _low(w[r + 2, i]) * p + _high(w[r + 2, i]) * q
                a3 += _low(w[r + 3, i]) * p + _high(w[r + 3, i]) * q
                b0 += _low(w[r, i]) * s + _high(w[r, i]) * t
                b1 += _low(w[r + 1, i]) * s + _high(w[r + 1, i]) * t
                b2 += _low(w[r + 2, i]) * s + _high(w[r + 2, i]) * t
                b3 += _low(w[r + 3, i]) * s + _high(w[r + 3, i]) * t
            _put(y, j, r, a0, a1, a2, a3, add)
            _put(y, j + 1, r, b0, b1, b2, b3, add)
        for j in range(paired, m):
            a0, a1, a2, a3 = ZERO, ZERO, ZERO, ZERO
            for i in range(k):
                p, q = x[j, i], x[j, k + i]
                a0 += _low(w[r, i]) * p + _high(w[r, i]) * q
                a1 += _low(w[r + 1, i]) * p + _high(w[r + 1, i]) * q
                a2 += _low(w[r + 2, i]) * p + _high(w[r + 2, i]) * q
                a3 += _low(w[r + 3, i]) * p + _high(w[r + 3, i]) * q
            _put(y, j, r, a0, a1, a2, a3, add)
    for r in range(tiled, stop):
        for j in range(m):
            a0 = ZERO
            for i in range(k):
                a0 += _low(w[r, i]) * x[j, i] + _high(w[r, i]) * x[j, k + i]
            y[j, r] = y[j, r] + a0 if add else a0


@njit
def _put(y, j, r, a0, a1, a2, a3, add):
    if add:
        a0, a1, a2, a3 = a0 + y[j, r], a1 + y[j, r + 1], a2 + y[j, r + 2], a3 + y[j, r + 3]
    y[j, r], y[j, r + 1], y[j, r + 2], y[j, r + 3] = a0, a1, a2, a3


def _rows(dtype, address, n, x, y, start, stop, add):
    """`_rows_float32` or `_rows_bfloat16`."""


@overload(_rows, jit_options=LOOPS)
def _(dtype, address, n, x, y, start, stop, add):
    def bfloat16(dtype, address, n, x, y, start, stop, add):
        _rows_bfloat16(address, n, x, y, start, stop, add)

    def float32(dtype, address, n, x, y, start, stop, add):
        _rows_float32(address, n, x, y, start, stop, add)

    return bfloat16 if _is_bfloat16(dtype.dtype) else float32


def _as_read(dtype, x):
    """x as the products of the dtype read it."""


@overload(_as_read)
def _(dtype, x):
    return (lambda dtype, x: _split(x)) if _is_bfloat16(dtype.dtype) else (lambda dtype, x: x)


@njit
def _split(x):
    m, k = x.shape[0], x.shape[1] // 2
    made = np.empty_like(x)
    for j in range(m):
        for i in range(k):
            made[j, i], made[j, k + i] = x[j, 2 * i], x[j, 2 * i + 1]
    return made


@njit(parallel=True, **LOOPS)
def _product(dtype, threads, weight, bias, x, y, add):
    """y: [m, n] = or += x: [m, k] times the transpose of `weight`: [n, k], plus `bias`: [n]."""
    n, read = y.shape[1], _as_read(dtype, x)
    for t in prange(threads):
        start, stop = _share(n, t, threads)
        _rows(dtype, weight, n, read, y, start, stop, add)
        _add_bias(bias, y, start, stop)


@njit(parallel=True, **LOOPS)
def _gated(dtype, threads, weight, bias, x, gate_up, y):
    """y: [m, n] = silu(gate) * up, which are the halves of the product with `weight`: [2n, k], made in `gate_up`."""
    n, read = y.shape[1], _as_read(dtype, x)
    for t in prange(threads):
        start, stop = _share(n, t, threads)
        for part in range(2):
            a, b = part * n + start, part * n + stop
            _rows(dtype, weight, 2 * n, read, gate_up, a, b, False)
            _add_bias(bias, gate_up, a, b)
        for j in range(y.shape[0]):
            for r in range(start, stop):
                y[j, r] = _silu(gate_up[j, r]) * gate_up[j, n + r]


@njit
def _share(n, t, threads):
    """Of n rows those of one thread, in whole tiles."""
    tiles = (n + TILE - 1) // TILE
    return min(n, tiles * t // threads * TILE), min(n, tiles * (t + 1) // threads * TILE)


@njit(**LOOPS)
def _add_bias(address, y, start, stop):
    if address:
        bias = _floats(address, y.shape[1])
        for j in range(y.shape[0]):
            for r in range(start, stop):
                y[j, r] += bias[r]


# ---------------------------------------------------------------- between the products


@njit(**LOOPS)
def _norm(x, weight, eps, out):
    """RMSNorm (arXiv:1910.07467) of each row. weight: the address of a float32 [k]."""
    k = x.shape[1]
    w = _floats(weight, k)
    for j in range(x.shape[0]):
        squares = ZERO
        for i in range(k):
            squares += _wide(x[j, i]) * _wide(x[j, i])
        scale = np.float32(ONE / math.sqrt(squares / np.float32(k) + eps))
        for i in range(k):
            out[j, i] = _narrow(_wide(x[j, i]) * scale * w[i], out[j, i])


@njit(**LOOPS)
def _norm_heads(states, weight, eps):
    """states: [m, heads, dim], each head by itself, in place."""
    for j in range(states.shape[0]):
        _norm(states[j], weight, eps, states[j])


@njit(**LOOPS)
def _rotate(states, cos, sin):
    """Rotary positions (arXiv:2104.09864) of [m, heads, dim], in place: the second half of each head stands for the
    imaginary part. cos, sin: [m, dim]."""
    m, heads, dim = states.shape
    half_dim = dim // 2
    for j in range(m):
        for head in range(heads):
            for i in range(half_dim):
                real, imaginary = states[j, head, i], states[j, head, half_dim + i]
                states[j, head, i] = real * cos[j, i] - imaginary * sin[j, i]
                states[j, head, half_dim + i] = imaginary * cos[j, half_dim + i] + real * sin[j, half_dim + i]


@njit(**LOOPS)
def _silu(x):
    return x / (ONE + _exp(-x))


@njit(**LOOPS)
def _keep(dtype, states, side, places):
    """Write keys or values, [m, kv_heads, dim], where `places` says. side: 0 of keys, 1 of values."""
    m, heads, dim = states.shape
    for j in range(m):
        room, at = places[j, 2], places[j, 4]
        to = _array_at(dtype, places[j, side], heads * room, dim)
        for head in range(heads):
            for i in range(dim):
                to[head * room + at, i] = _narrow(states[j, head, i], to[0, 0])


@njit(parallel=True, **LOOPS)
def _attention(dtype, threads, states, heads, kv_heads, places, scaling, out):
    """out: [m, heads, dim]. Each token sees the keys from its first place to its own.

    Queries that read the same keys (of a session's tokens, and of the heads that share them) lie side by side in what
    the threads share, and go over them together.
    """
    m, dim, group = states.shape[0], states.shape[2], heads // kv_heads
    for t in prange(threads):
        start, stop = m * heads * t // threads, m * heads * (t + 1) // threads
        room, begin, at = np.empty((2 * BLOCK + 1, max(dim, BLOCK)), np.float32), 0, 0
        while begin < m:
            end = begin + 1
            while end < m and places[end, 0] == places[begin, 0]:
                end += 1
            for head in range(kv_heads):
                a, b = max(start, at), min(stop, at + (end - begin) * group)
                if a < b:
                    _attend(dtype, states, begin, head, group, places, a - at, b - at, scaling, room, out)
                at += (end - begin) * group
            begin = end


@njit(**LOOPS)
def _attend(dtype, states, begin, head, group, places, start, stop, scaling, room, out):
    """Of the queries of one session those numbered [start, stop), over its keys and values of the shared `head`. Number
    n is of the token begin + n // group, and of the n % group-th head that shares them.

    One block of keys after the other, with a running maximum and sum (arXiv:2205.14135, algorithm 1).
    """
    dim, held = states.shape[2], places[begin, 2]
    first, last = places[begin + start // group, 3], places[begin + (stop - 1) // group, 4]
    keys = _array_at(dtype, places[begin, 0], (head + 1) * held, dim)
    values = _array_at(dtype, places[begin, 1], (head + 1) * held, dim)
    running = np.empty((stop - start, 2), np.float32)
    for n in range(start, stop):
        running[n - start, 0], running[n - start, 1] = -np.inf, ZERO
        out[begin + n // group, head * group + n % group, :] = ZERO
    for block in range(first, last + 1, BLOCK):
        a, b = head * held + block, head * held + min(block + BLOCK, last + 1)
        some_keys, some_values = _widened(keys[a:b], room[:BLOCK]), _widened(values[a:b], room[BLOCK : 2 * BLOCK])
        for n in range(start, stop):
            j, own = begin + n // group, head * group + n % group
            lo, hi = max(places[j, 3] - block, 0), min(places[j, 4] - block + 1, b - a)
            if lo < hi:
                scores, state = room[2 * BLOCK], running[n - start]
                _look(states[j, own], some_keys[lo:hi], some_values[lo:hi], scaling, scores, state, out[j, own])
    for n in range(start, stop):
        seen, scale = out[begin + n // group, head * group + n % group], ONE / running[n - start, 1]
        for i in range(dim):
            seen[i] *= scale


def _widened(rows, room):
    """[n, dim] of KV as float32, with dim or more columns."""


@overload(_widened, jit_options=LOOPS)
def _(rows, room):
    def bfloat16(rows, room):
        for t in range(rows.shape[0]):
            for i in range(rows.shape[1]):
                room[t, i] = _wide(rows[t, i])
        return room[: rows.shape[0]]

    return bfloat16 if _is_bfloat16(rows.dtype) else (lambda rows, room: rows)


@njit(**LOOPS)
def _look(query, keys, values, scaling, scores, running, out):
    """One query over n more keys. running: the largest score so far, and the sum of the weights, which are e to the
    scores' differences from it; out: the weighted sum of the values."""
    n, dim = keys.shape[0], query.shape[0]
    tiled, top = n - n % TILE, running[0]
    for t in range(0, tiled, TILE):
        a0, a1, a2, a3 = ZERO, ZERO, ZERO, ZERO
        for i in range(dim):
            q = query[i]
            a0 += q * keys[t, i]
            a1 += q * keys[t + 1, i]
            a2 += q * keys[t + 2, i]
            a3 += q * keys[t + 3, i]
        scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = a0, a1, a2, a3
    for t in range(tiled, n):
        a0 = ZERO
        for i in range(dim):
            a0 += query[i] * keys[t, i]
        scores[t] = a0
    for t in range(n):
        scores[t] *= scaling
        top = max(top, scores[t])
    before, total = _exp(running[0] - top), ZERO
    for t in range(n):
        scores[t] = _exp(scores[t] - top)
        total += scores[t]
    running[0], running[1] = top, running[1] * before + total
    for i in range(dim):
        out[i] *= before
    for t in range(0, tiled, TILE):
        a0, a1, a2, a3 = scores[t], scores[t + 1], scores[t + 2], scores[t + 3]
        for i in range(dim):
            out[i] += a0 * values[t, i] + a1 * values[t + 1, i] + a2 * values[t + 2, i] + a3 * values[t + 3, i]
    for t in range(tiled, n):
        for i in range(dim):
            out[i] += scores[t] * values[t, i]


# ---------------------------------------------------------------- passes

# columns of a layer's table of addresses (norms and biases are float32), and of its numbers
LAYER_COLUMNS = 12
ATTENTION_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT = range(6)
OUT_BIAS, MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = range(6, LAYER_COLUMNS)
WEIGHTS = ATTENTION_NORM, QKV, OUT, MLP_NORM, GATE_UP, DOWN  # that every layer has
ATTENTION_EPS, Q_EPS, K_EPS, MLP_EPS, SCALING = range(5)


@njit(nogil=True, cache=True, **LOOPS)
def run_layers(
    weight_dtype, kv_dtype, threads, layers, numbers, places, x, cos, sin, heads, kv_heads,
    normed, states, seen, gate_up, inner,
):
    """x: float32 [m, width], changed in place to what comes out of the last layer. weight_dtype: of matrices.

    layers: int64 [layers, 12] and numbers: float32 [layers, 5], by the columns above. places: int64 [layers, m, 5]: the
    addresses of the keys and of the values of the token's session, how many positions each head has room for, and of
    those the first that the token sees and its own. cos, sin: float32 [m, dim]. normed, states, seen, gate_up, inner:
    room of [m, width], [m, heads + 2 kv_heads, dim], [m, heads, dim], [m, 2 inner] and [m, inner].
    """
    m = x.shape[0]
    flat, flat_seen, rotated = states.reshape((m, -1)), seen.reshape((m, -1)), heads + kv_heads
    for index in range(layers.shape[0]):
        layer, number, here = layers[index], numbers[index], places[index]
        _norm(x, layer[ATTENTION_NORM], number[ATTENTION_EPS], normed)
        _product(weight_dtype, threads, layer[QKV], layer[QKV_BIAS], normed, flat, False)
        if layer[Q_NORM]:
            _norm_heads(states[:, :heads], layer[Q_NORM], number[Q_EPS])
            _norm_heads(states[:, heads:rotated], layer[K_NORM], number[K_EPS])
        _rotate(states[:, :rotated], cos, sin)
        _keep(kv_dtype, states[:, heads:rotated], 0, here)
        _keep(kv_dtype, states[:, rotated:], 1, here)
        _attention(kv_dtype, threads, states, heads, kv_heads, here, number[SCALING], seen)
        _product(weight_dtype, threads, layer[OUT], layer[OUT_BIAS], flat_seen, x, True)
        _norm(x, layer[MLP_NORM], number[MLP_EPS], normed)
        _gated(weight_dtype, threads, layer[GATE_UP], layer[GATE_UP_BIAS], normed, gate_up, inner)
        _product(weight_dtype, threads, layer[DOWN], layer[DOWN_BIAS], inner, x, True)


@njit(nogil=True, cache=True, **LOOPS)
def run_head(weight_dtype, threads, norm, eps, weight, bias, x, logits):
    """logits: float32 [m, vocab], of x: [m, width] after the model's last norm."""
    normed = np.empty_like(x)
    _norm(x, norm, eps, normed)
    _product(weight_dtype, threads, weight, bias, normed, logits, False)


# ---------------------------------------------------------------- rows of long passes


@njit(parallel=True, nogil=True, cache=True, **LOOPS)
def norm_rows(threads, x, weight, eps, out):
    """out = RMSNorm of each row of x, both [n, width] of the model's dtype. weight: address of a float32 [width]."""
    n = x.shape[0]
    for t in prange(threads):
        start, stop = n * t // threads, n * (t + 1) // threads
        _norm(x[start:stop], weight, eps, out[start:stop])


@njit(parallel=True, nogil=True, cache=True, **LOOPS)
def rotate_rows(threads, states, heads, rotated, q_norm, q_eps, k_norm, k_eps, cos, sin):
    """states: [n, heads + 2 kv_heads, dim] of the model's dtype, of which the first `rotated`, queries and keys, get
    their rotary positions in place. q_norm, k_norm: addresses, 0 for none. cos, sin: float32 [n, dim]."""
    n, dim = states.shape[0], states.shape[2]
    for t in prange(threads):
        wide = np.empty((1, 1, dim), np.float32)
        for j in range(n * t // threads, n * (t + 1) // threads):
            for head in range(rotated):
                for i in range(dim):
                    wide[0, 0, i] = _wide(states[j, head, i])
                if q_norm:
                    _norm(wide[0], q_norm if head < heads else k_norm, q_eps if head < heads else k_eps, wide[0])
                _rotate(wide, cos[j : j + 1], sin[j : j + 1])
                for i in range(dim):
                    states[j, head, i] = _narrow(wide[0, 0, i], states[j, head, i])


@njit(parallel=True, nogil=True, cache=True, **LOOPS)
def gate_rows(threads, gate_up, out):
    """out: [n, inner] = silu(gate) * up, the halves of gate_up: [n, 2 inner], all of the model's dtype."""
    n, inner = out.shape
    for t in prange(threads):
        for j in range(n * t // threads, n * (t + 1) // threads):
            for i in range(inner):
                out[j, i] = _narrow(_silu(_wide(gate_up[j, i])) * _wide(gate_up[j, inner + i]), out[j, i])
