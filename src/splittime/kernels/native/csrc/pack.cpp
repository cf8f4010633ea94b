// Lays weights out for the kernels, once, when they are loaded. The float schemes; pack_int.cpp has the others.
//
// Both float layouts are panels of 16 rows in which 32-bit words are transposed, [panel][word][16 rows]: a word is a
// float32, or two neighbouring bfloat16. Rows and columns that a panel lacks are zero.
#include <string.h>

#include "halves.h"
#include "pack_int.h"
#include "pool.h"
#include "splittime.h"

namespace {

constexpr int BLOCK = 256;  // columns that are converted, then transposed, in the first-level cache

bool is_float(int32_t scheme) { return scheme == ST_FLOAT32 || scheme == ST_BFLOAT16; }
int64_t words_of(int32_t scheme, int32_t columns) { return scheme == ST_FLOAT32 ? columns : (columns + 1) / 2; }
// Round to nearest, ties to even; a NaN stays one.
INLINE uint16_t to_bfloat16(float x) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(x != x ? (bits >> 16) | 64 : rounded);
}

INLINE void to_bfloat16s(const void *from, int32_t dtype, int64_t count, uint16_t *to) {
  if (dtype == ST_BFLOAT16) {
    memcpy(to, from, count * sizeof *to);
    return;
  }
  float memory[BLOCK];
  const float *wide = static_cast<const float *>(from);
  if (dtype != ST_FLOAT32) {
    to_float32(from, dtype, count, memory);
    wide = memory;
  }
  for (int64_t i = 0; i < count; i++) to[i] = to_bfloat16(wide[i]);
}

// One panel: `rows` rows of the source (16, or fewer in the last).
WIDE void pack_panel(int32_t scheme, int32_t columns, const uint8_t *source, int32_t dtype, int32_t rows,
                     uint8_t *panel) {
  constexpr int STRIDE = BLOCK + 16;  // rows in different cache sets
  uint32_t staged[PANEL * STRIDE];
  if (rows < PANEL) memset(staged, 0, sizeof staged);
  const int64_t row_bytes = columns * size_of(dtype);
  for (int32_t begin = 0; begin < columns; begin += BLOCK) {
    const int32_t count = columns - begin < BLOCK ? columns - begin : BLOCK;
    for (int32_t r = 0; r < rows; r++) {
      const uint8_t *from = source + r * row_bytes + begin * size_of(dtype);
      uint32_t *to = staged + r * STRIDE;
      if (scheme == ST_FLOAT32) {
        to_float32(from, dtype, count, reinterpret_cast<float *>(to));
      } else {
        if (count % 2) to[count / 2] = 0;
        to_bfloat16s(from, dtype, count, reinterpret_cast<uint16_t *>(to));
      }
    }
    const int64_t first = words_of(scheme, begin);
    transpose(staged, STRIDE, words_of(scheme, count), reinterpret_cast<uint32_t *>(panel) + first * PANEL);
  }
}

void unpack_row(const StLinear *linear, int32_t row, float *to) {
  const int64_t words = words_of(linear->scheme, linear->in_features);
  const uint32_t *from = reinterpret_cast<const uint32_t *>(linear->blob) + row / PANEL * words * PANEL + row % PANEL;
  for (int32_t k = 0; k < linear->in_features; k++) {
    const uint32_t word = from[words_of(linear->scheme, k + 1) * PANEL - PANEL];
    if (linear->scheme == ST_FLOAT32)
      to[k] = from_bits(word);
    else
      to[k] = from_bits(k % 2 ? word & 0xffff0000u : word << 16);
  }
}

}  // namespace

extern "C" {

int64_t st_packed_bytes(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras) {
  if (!is_float(scheme)) return int_packed_bytes(scheme, out_features, in_features, group, extras);
  return (int64_t)(out_features + PANEL - 1) / PANEL * words_of(scheme, in_features) * PANEL * 4;
}

void st_pack(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras, const void *weight,
             int32_t dtype, int32_t row_begin, int32_t row_end, uint8_t *blob) {
  if (!is_float(scheme)) {
    pack_int(scheme, out_features, in_features, group, extras, weight, dtype, row_begin, row_end, blob);
    return;
  }
  const int64_t source_bytes = in_features * size_of(dtype) * PANEL;
  const int64_t panel_bytes = words_of(scheme, in_features) * PANEL * 4;
  for_each((row_end - row_begin + PANEL - 1) / PANEL, [&](int32_t panel) {
    const int32_t left = row_end - row_begin - panel * PANEL;
    pack_panel(scheme, in_features, static_cast<const uint8_t *>(weight) + panel * source_bytes, dtype,
               left < PANEL ? left : PANEL, blob + (row_begin / PANEL + panel) * panel_bytes);
  });
}

void st_pack_quantized(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, const int8_t *values,
                       const float *scales, const uint8_t *zeros, uint8_t *blob) {
  st_pack_rounded(scheme, out_features, in_features, group, zeros ? ST_ZEROS : 0, values, scales, zeros, nullptr,
                  nullptr, 0, out_features, blob);
}

void st_pack_rounded(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras,
                     const int8_t *values, const float *scales, const uint8_t *zeros, const float *minima,
                     const float *steps, int32_t row_begin, int32_t row_end, uint8_t *blob) {
  pack_int_rounded(scheme, out_features, in_features, group, extras, {values, scales, zeros, minima, steps}, row_begin,
                   row_end, blob);
}

void st_unpack(const StLinear *linear, float *weight) {
  if (!is_float(linear->scheme)) {
    unpack_int(linear, weight);
    return;
  }
  for_each(linear->out_features,
           [&](int32_t row) { unpack_row(linear, row, weight + (int64_t)row * linear->in_features); });
}

}  // extern "C"
