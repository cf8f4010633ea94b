// Turning a row before it is rounded: blocks of columns, each of TURNED, or of the largest powers of two that fit in what is
// left, are multiplied by the Hadamard matrix of their size over the root of it. That is a rotation, which a weight shares
// with its activations, so a product stays what it was. But what one column had alone is spread over a block, and so a row's
// largest value, and with it the step of its rounding, comes near to its mean. Turned twice, a row is as it was.
// kernels/reference/rounding.py does the same sums in the same order, as do all instruction sets: to the bit. Needs simd.h.
#pragma once

namespace ST_ISA {

constexpr int64_t TURNED = 512;
constexpr int VECTORS64 = 64 / LANES;

// Sums and differences of lanes S apart.
template <int S> inline __attribute__((always_inline)) F32 butterfly(F32 v) {
  F32 sign;
  I32 other;
  ST_UNROLL for (int i = 0; i < LANES; i++) sign[i] = i & S ? -1.0f : 1.0f, other[i] = i ^ S;
  return v * sign + __builtin_shuffle(v, other);
}

inline __attribute__((always_inline)) void add_and_subtract(F32 &a, F32 &b) {
  const F32 sum = a + b;
  b = a - b, a = sum;
}

// 64 columns, times `factor`.
inline __attribute__((always_inline)) void turn64(const float *x, float factor, float *to) {
  F32 v[VECTORS64];
  ST_UNROLL for (int i = 0; i < VECTORS64; i++) {
    v[i] = butterfly<4>(butterfly<2>(butterfly<1>(load<F32>(x + i * LANES))));
    if (LANES == 16) v[i] = butterfly<LANES / 2>(v[i]);
  }
  ST_UNROLL for (int apart = 1; apart < VECTORS64; apart *= 2)
    ST_UNROLL for (int i = 0; i < VECTORS64; i++)
      if (!(i & apart)) add_and_subtract(v[i], v[i + apart]);
  ST_UNROLL for (int i = 0; i < VECTORS64; i++) store(to + i * LANES, v[i] * factor);
}

// size: a power of two. to: may be x.
inline __attribute__((always_inline)) void turn_block(const float *x, int64_t size, float *to) {
  const float factor = 1 / sqrtf((float)size);
  if (size < 64) {
    if (to != x) memcpy(to, x, size * sizeof *x);
    for (int64_t apart = 1; apart < size; apart *= 2)
      for (int64_t i = 0; i < size; i++)
        if (!(i & apart)) {
          const float sum = to[i] + to[i + apart];
          to[i + apart] = to[i] - to[i + apart], to[i] = sum;
        }
    for (int64_t i = 0; i < size; i++) to[i] *= factor;
    return;
  }
  for (int64_t k = 0; k < size; k += 64) turn64(x + k, size == 64 ? factor : 1, to + k);
  for (int64_t apart = 64; apart < size; apart *= 2) {
    const float last = 2 * apart == size ? factor : 1;
    for (int64_t begin = 0; begin < size; begin += 2 * apart)
      for (int64_t i = begin; i < begin + apart; i += LANES) {
        F32 a = load<F32>(to + i), b = load<F32>(to + i + apart);
        add_and_subtract(a, b);
        store(to + i, a * last), store(to + i + apart, b * last);
      }
  }
}

// x: `count` columns. to: may be x.
inline __attribute__((always_inline)) void turn(const float *x, int64_t count, float *to) {
  for (int64_t at = 0, size = TURNED; at < count; at += size) {
    while (size > count - at) size /= 2;
    turn_block(x + at, size, to + at);
  }
}

}  // namespace ST_ISA
