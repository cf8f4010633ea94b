// The products of attention_decode.inl: a few query heads against the tiles of a chunk, in floats.
#pragma once

namespace ST_ISA::paged {

// Tell the memory that BYTES from here on are wanted soon.
template <int BYTES> ST_INLINE void ask_for(const char *from) {
#pragma GCC unroll 8
  for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(from + at, 0, 3);
}

template <class T> struct Tile {
  const T *keys, *values;                  // [dim][size] and [tokens][width]
  const float *key_scales, *value_scales;  // int8 only
};

// Vectors of values that a register tile of R heads covers: enough sums to keep the multipliers busy, few enough for 16
// registers.
template <int R> constexpr int VECTORS = R == 1 ? 8 : R == 2 || LANES == 16 ? 4 : 2;

// A value that stays in its register: left to itself, GCC 12 moves sums to the stack, and loads a vector again for each
// head.
#if defined(__AVX2__)
#define ST_IN_REGISTER(x) asm("" : "+v"(x))
#else
#define ST_IN_REGISTER(x)
#endif

// sums[r][v] += a[r * step] * b[v], in an order that has 16 registers live: the sums, b, and one of a.
template <int R, int NV>
ST_INLINE void add_products(const float *a, int step, F32 (&b)[NV], F32 (&sums)[R][NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; v++) ST_IN_REGISTER(b[v]);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const F32 one = splat(a[r * step]);
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      sums[r][v] = fma(one, b[v], sums[r][v]);
      ST_IN_REGISTER(sums[r][v]);
    }
  }
}

// NV vectors of elements in memory as floats. Pairs of bfloat16 vectors come as (even elements, odd elements): one
// operation each, of one load; `in_order` undoes it on sums.
template <class T> ST_INLINE void widen_pair(const T *p, F32 &first, F32 &second) {
  first = widen(p), second = widen(p + LANES);
}
ST_INLINE void widen_pair(const uint16_t *p, F32 &even, F32 &odd) {
  const U32 both = load<U32>(p);
  even = (F32)(both << 16), odd = (F32)(both & 0xffff0000);
}
template <class T, int NV> ST_INLINE void widen_vectors(const T *p, F32 (&to)[NV]) {
#pragma GCC unroll 4
  for (int v = 0; v + 2 <= NV; v += 2) widen_pair(p + v * LANES, to[v], to[v + 1]);
  if (NV % 2) to[NV - 1] = widen(p + (NV - 1) * LANES);
}
template <class T> ST_INLINE void in_order(F32 &first, F32 &second) {
  if (!std::is_same_v<T, uint16_t>) return;
  const I32 order = lane_numbers() / 2 + (lane_numbers() & 1) * LANES;
  const F32 low = __builtin_shuffle(first, second, order);
  second = __builtin_shuffle(first, second, order + LANES / 2);
  first = low;
}

template <class T> void put_in_order(float *results, int32_t width) {
  for (int32_t d = 0; d + 2 * LANES <= width; d += 2 * LANES) {
    F32 first = load<F32>(results + d), second = load<F32>(results + d + LANES);
    in_order<T>(first, second);
    store(results + d, first), store(results + d + LANES, second);
  }
}

// scores[r][0 .. NV LANES) = q_r . NV vectors of a tile's keys, [dim][size]; q: [dim][R]. `ahead`: as many bytes that
// are wanted soon.
template <class T, int R, int NV>
__attribute__((noinline)) void score_vectors(const float *q, const T *keys, int64_t size, int32_t dim,
                                             const char *ahead, float *scores) {
  constexpr int CHAINS = R * NV >= 8 ? 1 : R * NV >= 4 ? 2 : R * NV >= 2 ? 4 : 8;
  constexpr int BYTES = NV * LANES * sizeof(T), LINE = BYTES < 64 ? 64 / BYTES : 1;
  constexpr int STEPS = LINE > CHAINS ? LINE : CHAINS;
  F32 sums[CHAINS][R][NV] = {};
  auto take = [&](int32_t d, int chain) __attribute__((always_inline)) {
    F32 some[NV];
    widen_vectors<T, NV>(keys + d * size, some);
    add_products<R, NV>(q + d * R, 1, some, sums[chain]);
  };
  int32_t d = 0;
  for (; d + STEPS <= dim; d += STEPS) {
    ask_for<STEPS * BYTES>(ahead + d * BYTES);
#pragma GCC unroll 8
    for (int u = 0; u < STEPS; u++) take(d + u, u % CHAINS);
  }
  for (; d < dim; d++) take(d, 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int c = 1; c < CHAINS; c++)
      for (int v = 0; v < NV; v++) sums[0][r][v] += sums[c][r][v];
    if (NV == 2) in_order<T>(sums[0][r][0], sums[0][r][NV - 1]);
    for (int v = 0; v < NV; v++) store(scores + r * CHUNK + v * LANES, sums[0][r][v]);
  }
}

// results[r][0 .. NV LANES) += the weighted values of `tokens`, [token][width]; pairs as widen_pair has them.
template <class T, int R, int NV>
__attribute__((noinline)) void mix_vectors(const float *weights, const T *values, int64_t width, int32_t tokens,
                                           const char *ahead, float *results, int64_t wide_dim) {
  constexpr int BYTES = NV * LANES * sizeof(T), LINE = BYTES < 64 ? 64 / BYTES : 1;  // LINE: tokens that read a line
  F32 sums[R][NV];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sums[r][v] = load<F32>(results + r * wide_dim + v * LANES);
  auto take = [&](int u) __attribute__((always_inline)) {
    F32 some[NV];
    widen_vectors<T, NV>(values + u * width, some);
    add_products<R, NV>(weights + u, CHUNK, some, sums);
  };
  int32_t t = 0;
  for (; t + LINE <= tokens; t += LINE, weights += LINE, values += LINE * width, ahead += LINE * BYTES) {
    ask_for<LINE * BYTES>(ahead);
#pragma GCC unroll 4
    for (int u = 0; u < LINE; u++) take(u);
  }
  for (; t < tokens; t++, weights++, values += width) take(0);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store(results + r * wide_dim + v * LANES, sums[r][v]);
}

}  // namespace ST_ISA::paged
