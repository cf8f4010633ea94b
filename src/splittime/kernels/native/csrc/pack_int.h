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
//
// float16 for scales and minima of groups: see tests/models/product_bounds.py for what that costs in exactness where a format
// has more bits (GGUF's Q4_K to Q6_K multiply a float16 by 6 or 8 bits). float32 would cost 2 or 4 bytes a group more:
// of an int4 weight in groups of 32 with minima, a fifth of all bytes, and so of the time of a decode step.
//
// Both are unsigned (zero point 128, and 8 or a group's own): the products of bytes that CPUs have take one unsigned
// operand, and it had better be the weight, since then the correction is a sum over activations and the weights need none.
// What pads a row or a column stands for zero.
#pragma once
#include "splittime.h"

constexpr int32_t PANEL = 16;  // output features

struct IntLayout {
  int64_t panels, columns, groups;  // columns: `in` with its padding; groups: 1 for int8 without
  int64_t zeros_at, minima_at, values_at, panel_bytes;
};

// Whether a scale belongs to a row. Such weights have a kernel of their own; all others have groups.
inline bool is_by_row(int32_t scheme, int32_t group) { return scheme == ST_INT8 && group == 0; }
inline bool is_grouped(const StLinear &weight) { return weight.scheme != ST_BFLOAT16 && !is_by_row(weight.scheme, weight.group); }

inline IntLayout int_layout(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras) {
  IntLayout layout;
  const bool by_row = is_by_row(scheme, group);
  const int64_t unit = by_row ? 64 : group;
  layout.panels = (out_features + PANEL - 1) / PANEL;
  layout.columns = (in_features + unit - 1) / unit * unit;
  layout.groups = by_row ? 1 : layout.columns / group;
  layout.zeros_at = layout.groups * PANEL * (by_row ? 4 : 2);
  layout.minima_at = layout.zeros_at + (extras & ST_ZEROS ? layout.groups * PANEL : 0);
  layout.values_at = (layout.minima_at + (extras & ST_MINIMA ? layout.groups * PANEL * 2 : 0) + 63) / 64 * 64;
  layout.panel_bytes = layout.values_at + layout.columns * PANEL / (scheme == ST_INT8 ? 1 : 2);
  return layout;
}

// st_packed_bytes, st_pack, st_pack_rounded and st_unpack for these two schemes.
int64_t int_packed_bytes(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras);
void pack_int(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras, const void *weight,
              int32_t dtype, int32_t row_begin, int32_t row_end, uint8_t *blob);
void pack_int_rounded(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras,
                      const int8_t *values, const float *scales, const uint8_t *zeros, const float *minima,
                      int32_t row_begin, int32_t row_end, uint8_t *blob);
void unpack_int(const StLinear *linear, float *weight);
