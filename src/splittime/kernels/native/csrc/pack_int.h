// The blob of an ST_INT8 or ST_INT4 weight: one panel after another, each of 16 output features with everything that
// belongs to them, so that a product reads one stream from memory and a part of the rows is a part of the blob.
//
//   int8 panel, group 0: float scale[16] | value[in / 4][16][4]; `in` padded to a multiple of 64
//   panel with groups:   float16 scale[groups][16] | uint8 zero[groups][16] if ST_ZEROS |
//                        float16 minimum[groups][16] if ST_MINIMA | to the next 64 bytes | values;
//                        `in` padded to a multiple of the group
//   values of int8:      uint8 value[in / 4][16][4], the integer + 128
//   values of int4:      uint8 pair[in / 8][16][4]: at [i][n][j] the integers at columns 8 i + j (lower half) and
//                        8 i + 4 + j
//   panel with ST_STEPS: for each 256 columns, which `in` is padded to: float16 step[16] | float16 step of minima[16] if
//                        ST_MINIMA | int8 steps of the scale[groups][16] | int8 steps of the minimum[groups][16] if
//                        ST_MINIMA | to the next 64 bytes | values; of ST_INT8 as lines of 64 bytes (of int8: one for four
//                        columns), four of 6 bits folded into three, or eight of 5 bits into five (`fold_lines`)
//
// float16 for scales and minima of groups: see tests/models/product_bounds.py for what that costs in exactness where a format
// has more bits. float32 would cost 2 or 4 bytes a group more: of an int4 weight in groups of 32 with minima, a fifth of all
// bytes, and so of the time of a decode step. GGUF's Q4_K to Q6_K, a float16 times 6 or 8 bits, lose nothing with ST_STEPS.
//
// Both are unsigned (zero point 128, and 8 or a group's own): the products of bytes that CPUs have take one unsigned
// operand, and it had better be the weight, since then the correction is a sum over activations and the weights need none.
// What pads a row or a column stands for zero.
#pragma once
#include "splittime.h"

constexpr int32_t PANEL = 16;  // output features

constexpr int32_t STEPPED = 256;  // columns that have a step in common

struct IntLayout {
  int64_t panels, columns, groups;  // columns: `in` with its padding; groups: 1 for int8 without
  int64_t scales_at, zeros_at, minima_at, values_at, panel_bytes;  // with ST_STEPS all but the last are in a block of 256
  int64_t block_bytes;                                             // of that block, or 0
};

// How many bits an integer takes.
inline int32_t bits_of(int32_t scheme, int32_t extras) {
  return scheme == ST_INT4 ? 4 : !(extras & ST_STEPS) ? 8 : extras & ST_FIVE ? 5 : 6;
}
// What was taken off the integers of a group with minima: minimum = its steps - this * scale.
inline int32_t middle_of(int32_t scheme) { return scheme == ST_INT4 ? 8 : 16; }

// The integers of BITS bits in lines of 64 bytes: LINES of them hold QUADS lines of int8. T: any 32-bit integer, or a vector.
template <int BITS> struct Folded { static constexpr int QUADS = BITS == 6 ? 4 : 8, LINES = BITS == 6 ? 3 : 5; };

template <class T> inline __attribute__((always_inline)) void fold_lines(const T (&q)[4], T (&to)[3]) {
  to[0] = q[0] | (q[3] & 0x03030303) << 6;
  to[1] = q[1] | (q[3] & 0x0c0c0c0c) << 4;
  to[2] = q[2] | (q[3] & 0x30303030) << 2;
}
template <class T> inline __attribute__((always_inline)) void fold_lines(const T (&q)[8], T (&to)[5]) {
  to[0] = q[0] | (q[5] & 0x07070707) << 5;
  to[1] = q[1] | (q[5] & 0x18181818) << 2 | (q[7] & 0x08080808) << 4;
  to[2] = q[2] | (q[6] & 0x07070707) << 5;
  to[3] = q[3] | (q[6] & 0x18181818) << 2 | (q[7] & 0x10101010) << 3;
  to[4] = q[4] | (q[7] & 0x07070707) << 5;
}
template <class T> inline __attribute__((always_inline)) void spread_lines(const T (&f)[3], T (&to)[4]) {
  for (int i = 0; i < 3; i++) to[i] = f[i] & 0x3f3f3f3f;
  to[3] = (f[0] >> 6 & 0x03030303) | (f[1] >> 4 & 0x0c0c0c0c) | (f[2] >> 2 & 0x30303030);
}
template <class T> inline __attribute__((always_inline)) void spread_lines(const T (&f)[5], T (&to)[8]) {
  for (int i = 0; i < 5; i++) to[i] = f[i] & 0x1f1f1f1f;
  to[5] = (f[0] >> 5 & 0x07070707) | (f[1] >> 2 & 0x18181818);
  to[6] = (f[2] >> 5 & 0x07070707) | (f[3] >> 2 & 0x18181818);
  to[7] = (f[4] >> 5 & 0x07070707) | (f[1] >> 4 & 0x08080808) | (f[3] >> 3 & 0x10101010);
}

// Whether a scale belongs to a row. Such weights have a kernel of their own; all others have groups.
inline bool is_by_row(int32_t scheme, int32_t group) { return scheme == ST_INT8 && group == 0; }
inline bool is_grouped(const StLinear &weight) { return weight.scheme != ST_BFLOAT16 && !is_by_row(weight.scheme, weight.group); }

inline IntLayout int_layout(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras) {
  IntLayout layout;
  const bool by_row = is_by_row(scheme, group);
  const bool has_steps = extras & ST_STEPS;
  const int64_t unit = by_row ? 64 : has_steps ? STEPPED : group;
  layout.panels = (out_features + PANEL - 1) / PANEL;
  layout.columns = (in_features + unit - 1) / unit * unit;
  layout.groups = by_row ? 1 : layout.columns / group;
  const int64_t bits = bits_of(scheme, extras), minima = extras & ST_MINIMA ? 2 : 1;
  if (has_steps) {
    layout.scales_at = PANEL * 2 * minima;
    layout.zeros_at = layout.minima_at = layout.scales_at + STEPPED / group * PANEL;
    layout.values_at = (layout.scales_at + STEPPED / group * PANEL * minima + 63) / 64 * 64;
    layout.block_bytes = layout.values_at + STEPPED * PANEL * bits / 8;
    layout.panel_bytes = layout.columns / STEPPED * layout.block_bytes;
    return layout;
  }
  layout.scales_at = layout.block_bytes = 0;
  layout.zeros_at = layout.groups * PANEL * (by_row ? 4 : 2);
  layout.minima_at = layout.zeros_at + (extras & ST_ZEROS ? layout.groups * PANEL : 0);
  layout.values_at = (layout.minima_at + (extras & ST_MINIMA ? layout.groups * PANEL * 2 : 0) + 63) / 64 * 64;
  layout.panel_bytes = layout.values_at + layout.columns * PANEL * bits / 8;
  return layout;
}

// st_packed_bytes, st_pack, st_pack_rounded and st_unpack for these two schemes.
int64_t int_packed_bytes(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras);
void pack_int(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras, const void *weight,
              int32_t dtype, int32_t row_begin, int32_t row_end, uint8_t *blob);
struct GivenRows {
  const int8_t *values;
  const float *scales;
  const uint8_t *zeros;
  const float *minima, *steps;
};
void pack_int_rounded(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras,
                      const GivenRows &given, int32_t row_begin, int32_t row_end, uint8_t *blob);
void unpack_int(const StLinear *linear, float *weight);
