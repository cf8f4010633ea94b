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

// Sums that a register tile of R heads holds for each: enough chains to keep the multipliers busy, few enough for 16
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

// LANES tokens of a chunk: where their keys begin, [dim][size], and their values, [LANES][width], which are wanted
// soon.
template <class T> struct Column {
  const T *keys;
  const char *ahead;
};

// scores[r][0 .. NV LANES) = q_r . keys of NV columns; q: [dim][R].
template <class T, int R, int NV>
__attribute__((noinline)) void score_columns(const float *q, const Column<T> *columns, int64_t size, int32_t dim,
                                             float *scores) {
  constexpr int CHAINS = R * NV >= 8 ? 1 : R * NV >= 4 ? 2 : R * NV >= 2 ? 4 : 8;
  constexpr int BYTES = LANES * sizeof(T), LINE = 64 / BYTES, STEPS = LINE > CHAINS ? LINE : CHAINS;
  Column<T> mine[NV];
  for (int v = 0; v < NV; v++) mine[v] = columns[v];
  F32 sums[CHAINS][R][NV] = {};
  auto take = [&](int32_t d, int chain) __attribute__((always_inline)) {
    F32 keys[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) keys[v] = widen(mine[v].keys + d * size);
    add_products<R, NV>(q + d * R, 1, keys, sums[chain]);
  };
  int32_t d = 0;
  for (; d + STEPS <= dim; d += STEPS) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) ask_for<STEPS * BYTES>(mine[v].ahead + d * BYTES);
#pragma GCC unroll 8
    for (int u = 0; u < STEPS; u++) take(d + u, u % CHAINS);
  }
  for (; d < dim; d++) take(d, 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      F32 sum = sums[0][r][v];
#pragma GCC unroll 8
      for (int c = 1; c < CHAINS; c++) sum += sums[c][r][v];
      store(scores + r * CHUNK + v * LANES, sum);
    }
}

// sums[r] += sum over `tokens` of weights[r][token] * values[token]; values: [token][width].
template <class T, int R, int NV>
ST_INLINE void mix_tokens(const float *weights, const T *values, int64_t width, int32_t tokens, const char *ahead,
                          F32 (&sums)[R][NV]) {
  constexpr int BYTES = NV * LANES * sizeof(T), LINE = BYTES < 64 ? 64 / BYTES : 1;  // LINE: tokens that read a line
  auto take = [&](int u) __attribute__((always_inline)) {
    F32 some[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) some[v] = widen(values + u * width + v * LANES);
    add_products<R, NV>(weights + u, CHUNK, some, sums);
  };
  int32_t t = 0;
  for (; t + LINE <= tokens; t += LINE, weights += LINE, values += LINE * width, ahead += LINE * BYTES) {
    ask_for<LINE * BYTES>(ahead);
#pragma GCC unroll 4
    for (int u = 0; u < LINE; u++) take(u);
  }
  for (; t < tokens; t++, weights++, values += width) take(0);
}

// results[r][0 .. NV LANES) += the weighted values of tokens [from, to) of a chunk, in tiles of `size`, from column
// `column` on. `next`: the next chunk's tiles, whose keys are wanted soon.
template <class T, int R, int NV>
__attribute__((noinline)) void mix_vectors(const float *weights, const Tile<T> *tiles, const Tile<T> *next,
                                           int32_t size, int32_t width, int32_t column, int32_t from, int32_t to,
                                           float *results, int64_t wide_dim) {
  F32 sums[R][NV];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sums[r][v] = load<F32>(results + r * wide_dim + v * LANES);
  int32_t t = from, place = from % size;
  for (int32_t i = from / size; t < to; i++, place = 0) {
    const int32_t run = to - t < size - place ? to - t : size - place;
    const char *ahead = (const char *)(next[i].keys + column * size + place * NV * LANES);
    const T *values = tiles[i].values + (int64_t)place * width + column;
    mix_tokens<T, R, NV>(weights + t, values, width, run, ahead, sums);
    t += run;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store(results + r * wide_dim + v * LANES, sums[r][v]);
}

}  // namespace ST_ISA::paged
