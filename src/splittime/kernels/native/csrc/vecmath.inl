// What attention and the element-wise kernels share: exponentials, extremes, and loads that widen a KV element to
// float.
#pragma once

namespace ST_ISA {

#define ST_INLINE inline __attribute__((always_inline))

// b where one of them is a NaN, as the instructions have it, which GCC 12 does not find. With a mask, without which it warns.
#if defined(__AVX2__) && LANES == 8
ST_INLINE F32 larger(F32 a, F32 b) { return _mm256_max_ps(a, b); }
ST_INLINE F32 smaller(F32 a, F32 b) { return _mm256_min_ps(a, b); }
#elif defined(__AVX512F__) && LANES == 16
ST_INLINE F32 larger(F32 a, F32 b) { return _mm512_maskz_max_ps(-1, a, b); }
ST_INLINE F32 smaller(F32 a, F32 b) { return _mm512_maskz_min_ps(-1, a, b); }
#else
ST_INLINE F32 larger(F32 a, F32 b) { return a > b ? a : b; }
ST_INLINE F32 smaller(F32 a, F32 b) { return a < b ? a : b; }
#endif

// A NaN in `x` stays one.
ST_INLINE F32 at_least(F32 x, float least) { return larger(splat(least), x); }
ST_INLINE F32 at_most(F32 x, float most) { return smaller(splat(most), x); }

// 1.5 * 2^23: adding it to a float of moderate size leaves the nearest integer in the low bits.
constexpr float ROUNDER = 12582912.0f;

// 2^n for the integer n in the low bits of `rounded`, -127 <= n <= 128: 0 and infinity at the ends. A product, not a
// sum of exponents, is made with it, so that a NaN stays a NaN.
ST_INLINE F32 power_of_two(F32 rounded) { return (F32)(((I32)rounded + 127) << 23); }

// (2^f - 1) / f for f from -0.5 to 0.5.
ST_INLINE F32 exp2_slope(F32 f) {
  F32 y = splat(0x1.5bba14p-10f);
  y = fma(y, f, splat(0x1.3cea88p-7f));
  y = fma(y, f, splat(0x1.c6b752p-5f));
  y = fma(y, f, splat(0x1.ebf9bcp-3f));
  return fma(y, f, splat(0x1.62e42ap-1f));
}

// 2^x to 2e-7 of its value for x <= 128; 0 below -126.5.
ST_INLINE F32 exp2_of(F32 x) {
  x = at_least(x, -127.0f);
  F32 rounded = x + ROUNDER;
  F32 f = x - (rounded - ROUNDER);
  return fma(exp2_slope(f), f, splat(1.0f)) * power_of_two(rounded);
}

// tanh(x) to 5e-7 of its value: e / (e + 2) with e = e^2x - 1, which near 0 loses nothing to the 1.
ST_INLINE F32 tanh_of(F32 x) {
  x = at_most(at_least(x * 0x1.715476p+1f, -64.0f), 64.0f);
  F32 rounded = x + ROUNDER, power = power_of_two(rounded);
  F32 f = x - (rounded - ROUNDER);
  F32 e = fma(exp2_slope(f) * f, power, power - 1.0f);
  return e / (e + 2.0f);
}

// e^x to 3e-7 of its value, wherever that is a normal float; 0 and infinity beyond. ln 2 is taken off in two parts, so
// that the error does not grow with x.
ST_INLINE F32 exp_of(F32 x) {
  x = at_most(at_least(x, -88.0f), 89.0f);
  F32 rounded = fma(x, splat(0x1.715476p+0f), splat(ROUNDER)), n = rounded - ROUNDER;
  F32 f = fma(n, splat(-0x1.62e4p-1f), x);
  f = fma(n, splat(-0x1.7f7d1cp-20f), f);
  F32 y = splat(0x1.6ae6e0p-10f);
  y = fma(y, f, splat(0x1.1267d8p-7f));
  y = fma(y, f, splat(0x1.555824p-5f));
  y = fma(y, f, splat(0x1.555418p-3f));
  y = fma(y, f, splat(0x1.fffffcp-2f));
  y = fma(y, f, splat(1.0f));
  y = fma(y, f, splat(1.0f));
  return y * power_of_two(rounded);
}

ST_INLINE I32 lane_numbers() {
  I32 numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  return numbers;
}

ST_INLINE float largest_of(F32 v) {
  const I32 lanes = lane_numbers();
  for (int step = LANES / 2; step; step /= 2) v = larger(v, __builtin_shuffle(v, lanes ^ step));
  return v[0];
}

// LANES elements of a KV store as floats, without the scale of int8.
ST_INLINE F32 widen(const float *p) { return load<F32>(p); }
#if defined(__AVX512F__) && LANES == 16  // what GCC 12 makes of a widening conversion is several times as long
ST_INLINE F32 widen(const uint16_t *p) { return (F32)((U32)_mm512_maskz_cvtepu16_epi32(-1, load<__m256i>(p)) << 16); }
ST_INLINE F32 widen(const int8_t *p) { return to_f32((I32)_mm512_maskz_cvtepi8_epi32(-1, load<__m128i>(p))); }
#elif defined(__AVX2__) && LANES == 8
ST_INLINE F32 widen(const uint16_t *p) { return (F32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16); }
ST_INLINE F32 widen(const int8_t *p) { return to_f32((I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
#else
ST_INLINE F32 widen(const uint16_t *p) { return load_bf16(p); }
ST_INLINE F32 widen(const int8_t *p) { return to_f32(__builtin_convertvector(load<I8q>(p), I32)); }
#endif
inline float widen_one(float x) { return x; }
inline float widen_one(uint16_t x) { return f32_of_bf16(x); }
inline float widen_one(int8_t x) { return x; }

// body(a null pointer of the store's element type)
template <class F> inline void with_kv_type(int32_t type, F &&body) {
  if (type == ST_FLOAT32) body((float *)nullptr);
  if (type == ST_BFLOAT16) body((uint16_t *)nullptr);
  if (type == ST_INT8) body((int8_t *)nullptr);
}

// Where the tile of a block's head begins, in tiles; its scales begin at that times block_size. part: 0 keys, 1 values.
inline int64_t tile_of(const StKv &kv, int64_t block, int part, int head) {
  return (block * 2 + part) * kv.num_kv_heads + head;
}

// activation(gate) * up: of silu x / (1 + e^-x), of GELU the same of x with an exponent that is about 1.6 x (its
// approximation with a tanh, 0.5 x (1 + tanh(z)) = x / (1 + e^-2z)).
ST_INLINE F32 gated_by(int32_t activation, F32 gate, F32 up) {
  F32 exponent = gate;
  if (activation == ST_GELU) exponent = gate * fma(gate * gate, splat(0x1.2444f2p-4f), splat(0x1.988454p+0f));
  return gate / (exp_of(-exponent) + 1.0f) * up;
}

}  // namespace ST_ISA
