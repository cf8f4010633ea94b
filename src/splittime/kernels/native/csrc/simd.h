// Vectors of LANES floats, in GCC's vector extension: + - * & << and comparisons work on them, and the compiler emits
// what the file's flags allow. Only what it would not find by itself is an intrinsic here, each with a portable twin, so
// that the same kernel runs (and is tested) at 8 and at 16 lanes on a machine that has neither instruction.
//
// Defined by the including isa_*.cpp: LANES (8 or 16), and the compiler's own __AVX2__, __AVX512VNNI__, __AVX512BF16__.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ST_UNROLL _Pragma("GCC unroll 16")

namespace ST_ISA {

typedef float F32 __attribute__((vector_size(LANES * 4)));
typedef int32_t I32 __attribute__((vector_size(LANES * 4)));
typedef uint32_t U32 __attribute__((vector_size(LANES * 4)));
typedef int16_t I16 __attribute__((vector_size(LANES * 4)));    // 2 LANES of them
typedef int8_t I8 __attribute__((vector_size(LANES * 4)));      // 4 LANES of them
typedef uint8_t U8 __attribute__((vector_size(LANES * 4)));     // 4 LANES of them
typedef uint16_t U16h __attribute__((vector_size(LANES * 2)));  // LANES of them
typedef int16_t I16h __attribute__((vector_size(LANES * 2)));
typedef int8_t I8h __attribute__((vector_size(LANES * 2)));     // 2 LANES of them
typedef int8_t I8q __attribute__((vector_size(LANES)));         // LANES of them

// Memory of one thread that grows to what the largest call needed, and stays. It is in this namespace, as is everything that
// the standard library's templates are made with in the kernels: a template of common types (a std::vector<float>) would
// be one function for all instruction sets, and the linker might keep the one with instructions that the CPU lacks.
template <class T> struct Room {
  T *data = nullptr;
  int64_t size = 0;
  ~Room() { free(data); }
  T *of(int64_t wanted) {
    if (wanted > size) {
      free(data);
      const int64_t bytes = (wanted * (int64_t)sizeof(T) + 4095) / 4096 * 4096;
      data = static_cast<T *>(aligned_alloc(4096, bytes));
      size = bytes / sizeof(T);
    }
    return data;
  }
  T &operator[](int64_t i) { return data[i]; }
};

template <class V> inline __attribute__((always_inline)) V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> inline __attribute__((always_inline)) void store(void *p, V v) { memcpy(p, &v, sizeof v); }

constexpr int64_t TILE_ROWS = 16;  // of a tile of AMX

// A store of a whole line, aligned, past the caches.
#if defined(__AVX512F__) && LANES == 16
constexpr bool CAN_STREAM = true;
inline __attribute__((always_inline)) void stream(float *to, F32 v) { _mm512_stream_ps(to, (__m512)v); }
#else
constexpr bool CAN_STREAM = false;
inline __attribute__((always_inline)) void stream(float *to, F32 v) { store(to, v); }
#endif

inline __attribute__((always_inline)) F32 splat(float x) { return x - F32{}; }  // x - 0 is x, which 0 + x is not
inline __attribute__((always_inline)) I32 splat(int32_t x) { return I32{} + x; }

// a * b + c in one rounding (GCC contracts it where the instruction exists).
inline __attribute__((always_inline)) F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }

inline __attribute__((always_inline)) F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }

// Widen LANES bfloat16 (the upper halves of floats) in memory.
inline __attribute__((always_inline)) F32 load_bf16(const uint16_t *p) {
  return (F32)(__builtin_convertvector(load<U16h>(p), U32) << 16);
}

// Round to bfloat16, ties to even; a NaN stays one.
inline __attribute__((always_inline)) U16h to_bf16(F32 v) {
  const U32 bits = (U32)v, up = bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_convertvector((v == v ? up : bits | 0x400000) >> 16, U16h);
}
inline uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 64);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float f32_of_bf16(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Sums of neighbouring products: lane i is a[2i] b[2i] + a[2i+1] b[2i+1].
inline __attribute__((always_inline)) I32 madd(I16 a, I16 b) {
#if defined(__AVX512BW__) && LANES == 16
  return (I32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && LANES == 8
  return (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  I32 sum;
  for (int i = 0; i < LANES; i++) sum[i] = (int32_t)a[2 * i] * b[2 * i] + (int32_t)a[2 * i + 1] * b[2 * i + 1];
  return sum;
#endif
}

// 16-bit lane i is a[2i] b[2i] + a[2i+1] b[2i+1]; the caller sees to it that it fits (|a| <= 15 or so).
inline __attribute__((always_inline)) I16 madd_u8(U8 a, I8 b) {
#if defined(__AVX512BW__) && LANES == 16
  return (I16)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && LANES == 8
  return (I16)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
  I16 sum;
  for (int i = 0; i < 2 * LANES; i++) sum[i] = (int16_t)(a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]);
  return sum;
#endif
}

// sum + a[4i] b[4i] + .. + a[4i+3] b[4i+3] in 32-bit lane i, exact. One instruction with VNNI.
inline __attribute__((always_inline)) I32 dot_u8(I32 sum, U8 a, I8 b) {
#if defined(__AVX512VNNI__) && LANES == 16
  return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 4 * i; j < 4 * i + 4; j++) sum[i] += (int32_t)a[j] * b[j];
  return sum;
#endif
}

// LANES signed bytes in memory.
inline __attribute__((always_inline)) I32 widen_to_i32(const void *p) {
#if defined(__AVX512F__) && LANES == 16
  return (I32)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)load<I8q>(p));
#elif defined(__AVX2__) && LANES == 8
  return (I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
  return __builtin_convertvector(load<I8q>(p), I32);
#endif
}

// 2 LANES bytes in memory as 16-bit integers.
inline __attribute__((always_inline)) I16 widen_i8(const int8_t *p) { return __builtin_convertvector(load<I8h>(p), I16); }

inline float sum_of(F32 v) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}

}  // namespace ST_ISA
