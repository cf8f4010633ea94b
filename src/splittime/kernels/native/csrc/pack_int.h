// The blob of an ST_INT8 or ST_INT4 weight: one panel after another, each of 16 output features with everything that
// belongs to them, so that a product reads one stream from memory and a part of the rows is a part of the blob.
//
//   int8 panel: float scale[16] | uint8 value[in / 4][16][4], the integer + 128; `in` padded to a multiple of 64
//   int4 panel: float16 scale[groups][16] | uint8 zero[groups][16] if has_zeros | to the next 64 bytes |
//               uint8 pair[in / 8][16][4]: at [i][n][j] the integers at columns 8 i + j (lower half) and 8 i + 4 + j;
//               `in` padded to a multiple of the group
//
// Both are unsigned (zero point 128, and 8 or a group's own): the products of bytes that CPUs have take one unsigned
// operand, and it had better be the weight, since then the correction is a sum over activations and the weights need none.
// What pads a row or a column stands for zero.
#pragma once
#include "splittime.h"

constexpr int32_t PANEL = 16;  // output features

struct IntLayout {
  int64_t panels, columns, groups;  // columns: `in` with its padding; groups: 1 for int8
  int64_t zeros_at, values_at, panel_bytes;
};

inline IntLayout int_layout(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t has_zeros) {
  IntLayout layout;
  const int64_t unit = scheme == ST_INT8 ? 64 : group;
  layout.panels = (out_features + PANEL - 1) / PANEL;
  layout.columns = (in_features + unit - 1) / unit * unit;
  layout.groups = scheme == ST_INT8 ? 1 : layout.columns / group;
  layout.zeros_at = layout.groups * PANEL * (scheme == ST_INT8 ? 4 : 2);
  layout.values_at = (layout.zeros_at + (has_zeros ? layout.groups * PANEL : 0) + 63) / 64 * 64;
  layout.panel_bytes = layout.values_at + layout.columns * PANEL / (scheme == ST_INT8 ? 1 : 2);
  return layout;
}

// st_packed_bytes, st_pack, st_pack_quantized and st_unpack for these two schemes.
int64_t int_packed_bytes(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t has_zeros);
void pack_int(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, const void *weight, int32_t dtype,
              int32_t row_begin, int32_t row_end, uint8_t *blob);
void pack_int_quantized(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, const int8_t *values,
                        const float *scales, const uint8_t *zeros, uint8_t *blob);
void unpack_int(const StLinear *linear, float *weight);
