// Activations of a product with integer weights: rounded to int8 once a call, and laid out for the tiles.
#pragma once
#include <math.h>

#include "linear_int_groups.inl"
#include "turn.inl"

namespace ST_ISA {

constexpr int64_t CHUNK = 512;  // columns at a time: a panel's weights in L1 (of four 32 KB), many tokens' activations in L2

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t aligned(int64_t bytes) { return rounded_up(bytes, 64); }

// Round to integers, ties to even. Beyond 127 there is only what comes of an infinity or a NaN: any number will do.
inline __attribute__((always_inline)) I32 rounded(F32 v) {
  v = v < 128 ? v : F32{};
  v = v > -128 ? v : F32{};
#if defined(__AVX512F__) && LANES == 16
  return (I32)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#elif defined(__AVX2__) && LANES == 8
  return (I32)_mm256_cvtps_epi32((__m256)v);
#else
  const F32 shifted = v + 12582912.0f;  // 1.5 * 2^23: no room for a fraction
  return (I32)shifted - 0x4b400000;
#endif
}

inline F32 load_some(const float *p, int64_t count) {
  if (count >= LANES) return load<F32>(p);
  F32 v{};
  if (count > 0) memcpy(&v, p, count * sizeof(float));
  return v;
}

// The largest magnitude; NaN if there is one (bit patterns sort like magnitudes, with NaN above infinity).
inline float largest(const float *x, int64_t count) {
  I32 most{};
  for (int64_t i = 0; i < count; i += LANES) {
    const I32 bits = (I32)load_some(x + i, count - i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t found = 0;
  for (int i = 0; i < LANES; i++) found = most[i] > found ? most[i] : found;
  float magnitude;
  memcpy(&magnitude, &found, 4);
  return magnitude;
}

// What to multiply with to get integers of -127..127. Below 1e-30 all round to 0, which keeps it finite.
inline float inverse_scale(float largest) { return largest < 1e-30f ? 0 : 127 / largest; }

// Bytes of a row that one product of tiles takes.
inline int64_t depth_of(int64_t block) { return block < 64 ? block : 64; }

// Tokens' activations, rounded, in chunks of columns: [chunk][token][columns of the chunk]; or, for AMX, in whole tiles,
// [chunk][tile of tokens][step of `depth` columns][token][depth].
struct Activations {
  int64_t tokens, columns;
  bool is_tiled;
  uint8_t *values;
  float *scales;    // by row: [token]
  int32_t *starts;  // by row: [token], -128 times the sum
  Block *blocks;    // in groups: [chunk][token][blocks of the chunk]
  int32_t block;    // in groups: columns of a block

  int64_t depth() const { return depth_of(block); }
  int64_t width(int64_t chunk) const { return columns - chunk * CHUNK < CHUNK ? columns - chunk * CHUNK : CHUNK; }
  // What tokens and columns take of the memory, with what fills up their tiles.
  int64_t padded_tokens() const { return is_tiled ? rounded_up(tokens, TILE_ROWS) : tokens; }
  int64_t padded_width(int64_t chunk) const { return is_tiled ? aligned(width(chunk)) : width(chunk); }
  int64_t bytes() const { return padded_tokens() * (is_tiled ? aligned(columns) : columns) * sizeof(Wide); }
  int64_t at(int64_t chunk, int64_t token) const { return chunk * CHUNK * padded_tokens() + token * padded_width(chunk); }
};

// The place of column k, for a store of up to LANES columns from there.
template <class T> inline T *place(const Activations &a, int64_t token, int64_t k) {
  const int64_t chunk = k / CHUNK, column = k % CHUNK, row = token % TILE_ROWS;
  if (!a.is_tiled) return (T *)a.values + a.at(chunk, token) + column;
  const int64_t depth = a.depth(), in_step = column & (depth - 1);  // depth: a power of two
  return (T *)a.values + a.at(chunk, token - row) + (column - in_step) * TILE_ROWS + row * depth + in_step;
}

// By row: one scale a token.
inline void round_token8(const Activations &a, int64_t token, const float *x, int64_t in) {
  const float most = largest(x, in), inverse = inverse_scale(most);
  I32 sum{};
  for (int64_t k = 0; k < a.columns; k += LANES) {
    const I32 v = rounded(load_some(x + k, in - k) * inverse);
    sum += v;
#if LANES == 16
    store(place<Wide>(a, token, k), __builtin_convertvector(v, I8q));
#else
    store(place<Wide>(a, token, k), __builtin_convertvector(v, I16h));
#endif
  }
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total += sum[i];
  a.scales[token] = most / 127;
  a.starts[token] = (int32_t)(-128u * (uint32_t)total);
}

// To bfloat16, ties to even; a NaN stays one. What pads the last pair is zero.
inline void round_bfloat16(const Activations &a, int64_t token, const float *x, int64_t in) {
  for (int64_t k = 0; k < in; k += LANES) {
    const U16h halves = to_bf16(load_some(x + k, in - k));
    const int64_t left = 2 * ((in - k + 1) / 2 * 2);
    memcpy(place<uint8_t>(a, token, 2 * k), &halves, left < (int64_t)sizeof halves ? left : (int64_t)sizeof halves);
  }
}

// The beginning of a block's sums. Not int8, at LANES 8: two of 16 bits, of columns 0, 1 and of columns 2, 3 of each four.
// zero: the weights' zero point.
template <bool IS_INT8> inline Block block_of(I32 sum, float scale, int32_t zero) {
  int32_t halves[2] = {0, 0};
  for (int i = 0; i < LANES; i++) halves[i % 4 / 2] += sum[i];
  Block block;
  block.scale = scale;
  block.sum = (float)(halves[0] + halves[1]);
  block.start = -zero * (halves[0] + halves[1]);
#if LANES == 8
  const int16_t starts[2] = {(int16_t)(-zero * halves[0]), (int16_t)(-zero * halves[1])};
  if (!IS_INT8) memcpy(&block.start, starts, 4);
#endif
  return block;
}

// In groups: one scale a group. The order of int8's activations is that of linear_int_groups.inl.
template <bool IS_INT8> inline void store_rounded(const Activations &a, int64_t token, int64_t k, I32 v) {
#if LANES == 8
  const I32 order = {0, 2, 1, 3, 4, 6, 5, 7};
  if (IS_INT8) return store(place<Wide>(a, token, k), __builtin_convertvector(__builtin_shuffle(v, order), I16h));
#endif
  store(place<int8_t>(a, token, k), __builtin_convertvector(v, I8q));
}

template <bool IS_INT8>
inline void round_groups(const Activations &a, int64_t token, const float *x, int64_t in, int64_t group, int32_t zero) {
  for (int64_t begin = 0; begin < a.columns; begin += group) {
    const float most = largest(x + begin, in - begin < group ? in - begin : group), inverse = inverse_scale(most);
    for (int64_t from = begin; from < begin + group; from += a.block) {
      I32 sum{};
      for (int64_t k = from; k < from + a.block; k += LANES) {
        const I32 v = rounded(load_some(x + k, in - k) * inverse);
        sum += v;
        store_rounded<IS_INT8>(a, token, k, v);
      }
      a.blocks[a.at(from / CHUNK, token) / a.block + from % CHUNK / a.block] = block_of<IS_INT8>(sum, most / 127, zero);
    }
  }
}

}  // namespace ST_ISA
