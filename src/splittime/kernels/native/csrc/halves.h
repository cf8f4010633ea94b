// 16-bit floats, for the files that pack: what vectors do with them in the kernels is in simd.h.
#pragma once
#include <stdint.h>
#include <string.h>

#include "splittime.h"
#include "wide.h"

INLINE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// The float whose exponent and mantissa are the half's, times 2^112 for the difference of the biases; right for subnormals
// too. Infinity and NaN: the exponent becomes the highest. Without branches, so that the compiler makes vectors of it.
INLINE float from_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  const float size = from_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  return from_bits(sign | to_bits(size) | special);
}

INLINE int64_t size_of(int32_t dtype) { return dtype == ST_FLOAT32 ? 4 : 2; }

// `count` values of ST_FLOAT32, ST_BFLOAT16 or ST_FLOAT16.
INLINE void to_float32(const void *from, int32_t dtype, int64_t count, float *to) {
  const uint16_t *halves = static_cast<const uint16_t *>(from);
  if (dtype == ST_FLOAT32)
    memcpy(to, from, count * sizeof *to);
  else if (dtype == ST_BFLOAT16)
    for (int64_t i = 0; i < count; i++) to[i] = from_bits((uint32_t)halves[i] << 16);
  else
    for (int64_t i = 0; i < count; i++) to[i] = from_half(halves[i]);
}
