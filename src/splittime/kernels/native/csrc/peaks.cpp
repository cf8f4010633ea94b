// Loops of peaks.h. Each is compiled for its own instructions (a target attribute, not the file's flags), so that this
// file compiles for any x86 processor and runs on any. Of each kind of arithmetic there are several: which is fastest is
// not known before it is measured (vdpbf16ps is slower than a float32 multiply-add on a processor that has tiles).
#include "peaks.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

bool amx_works();  // amx.cpp
#endif

namespace {

struct Loop {
  const char *name;
  int32_t kind;
  bool (*runs)();
  double operations;  // of a round
  void (*multiply)(int64_t rounds);
  int64_t (*read)(const char *bytes, int64_t size);
};

bool always() { return true; }

// For any processor, whatever the compiler makes of it.
void plain_multiply(int64_t rounds) {
  float x = 0.5f, sums[16];
  for (float &sum : sums) sum = 0.25f;
  for (int64_t r = 0; r < rounds; r++) {
    __asm__ volatile("" : "+m"(x));
    for (float &sum : sums) sum = sum * x + x;
  }
  __asm__ volatile("" : : "m"(sums));
}

int64_t plain_read(const char *bytes, int64_t size) {
  const uint64_t *words = reinterpret_cast<const uint64_t *>(bytes);
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (int64_t i = 0; i < size / 8; i += 4) a += words[i], b += words[i + 1], c += words[i + 2], d += words[i + 3];
  return int64_t(a + b + c + d);
}

#if defined(__x86_64__)

// Twelve sums in as many registers hide the latency of a multiply-add at two a cycle. HIDE keeps the compiler from
// seeing that the factors never change: it would fold the loop.
#define HIDE(x) __asm__ volatile("" : "+v"(x))
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define SUMS(TYPE, START, DO)                                                         \
  TYPE s0 = START, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0; \
  TYPE s8 = s0, s9 = s0, s10 = s0, s11 = s0;                                          \
  for (int64_t r = 0; r < rounds; r++) {                                              \
    EACH(DO)                                                                          \
  }
constexpr double CHAINS = 12;

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

__attribute__((target("avx2,fma"))) void fma_avx2(int64_t rounds) {
  __m256 x = _mm256_set1_ps(0.5f);
  HIDE(x);
#define DO(i) s##i = _mm256_fmadd_ps(s##i, x, x); HIDE(s##i);
  SUMS(__m256, x, DO)
#undef DO
}

__attribute__((target("avx512f,avx512bw"))) void fma_avx512(int64_t rounds) {
  __m512 x = _mm512_set1_ps(0.5f);
  HIDE(x);
#define DO(i) s##i = _mm512_fmadd_ps(s##i, x, x); HIDE(s##i);
  SUMS(__m512, x, DO)
#undef DO
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) void bf16_avx512(int64_t rounds) {
  __m512i raw = _mm512_set1_epi16(0x3f00);  // 0.5 twice
  HIDE(raw);
  __m512bh x = (__m512bh)raw;
  __m512 start = _mm512_set1_ps(0.5f);
#define DO(i) s##i = _mm512_dpbf16_ps(s##i, x, x); HIDE(s##i);
  SUMS(__m512, start, DO)
#undef DO
}

// 8-bit products that may saturate: pairs of bytes, then pairs of those.
__attribute__((target("avx2"))) void pairs8_avx2(int64_t rounds) {
  __m256i x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
  HIDE(x); HIDE(y); HIDE(one);
#define DO(i)                                                          \
  {                                                                    \
    __m256i p = _mm256_maddubs_epi16(x, y);                            \
    HIDE(p);                                                           \
    p = _mm256_madd_epi16(p, one);                                     \
    HIDE(p);                                                           \
    s##i = _mm256_add_epi32(s##i, p);                                  \
    HIDE(s##i);                                                        \
  }
  SUMS(__m256i, x, DO)
#undef DO
}

// 8-bit numbers that were widened to 16 bits before.
__attribute__((target("avx2"))) void pairs16_avx2(int64_t rounds) {
  __m256i x = _mm256_set1_epi16(3), y = _mm256_set1_epi16(5);
  HIDE(x); HIDE(y);
#define DO(i) { __m256i p = _mm256_madd_epi16(x, y); HIDE(p); s##i = _mm256_add_epi32(s##i, p); HIDE(s##i); }
  SUMS(__m256i, x, DO)
#undef DO
}

__attribute__((target("avx512f,avx512bw"))) void pairs8_avx512(int64_t rounds) {
  __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5), one = _mm512_set1_epi16(1);
  HIDE(x); HIDE(y); HIDE(one);
#define DO(i)                                                          \
  {                                                                    \
    __m512i p = _mm512_maddubs_epi16(x, y);                            \
    HIDE(p);                                                           \
    p = _mm512_madd_epi16(p, one);                                     \
    HIDE(p);                                                           \
    s##i = _mm512_add_epi32(s##i, p);                                  \
    HIDE(s##i);                                                        \
  }
  SUMS(__m512i, x, DO)
#undef DO
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) void vnni_avx512(int64_t rounds) {
  __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
  HIDE(x); HIDE(y);
#define DO(i) s##i = _mm512_dpbusd_epi32(s##i, x, y); HIDE(s##i);
  SUMS(__m512i, x, DO)
#undef DO
}

// ---- reading: the sum of four registers. Ahead: lines are asked for so many bytes before they are needed, because a
// core that follows one stream by itself may ask for too few at once.

constexpr int64_t AHEAD = 2048;

__attribute__((target("avx512f,avx512bw"))) int64_t total(__m512i sums) {
  alignas(64) int64_t each[8];
  _mm512_store_si512(each, sums);
  return each[0] + each[1] + each[2] + each[3] + each[4] + each[5] + each[6] + each[7];
}

template <bool IS_AHEAD>
__attribute__((target("avx2"))) int64_t read_avx2(const char *bytes, int64_t size) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t i = 0; i < size; i += 128) {
    const __m256i *at = reinterpret_cast<const __m256i *>(bytes + i);
    if (IS_AHEAD) _mm_prefetch(bytes + i + AHEAD, _MM_HINT_T0), _mm_prefetch(bytes + i + AHEAD + 64, _MM_HINT_T0);
    a = _mm256_add_epi64(a, _mm256_loadu_si256(at)), b = _mm256_add_epi64(b, _mm256_loadu_si256(at + 1));
    c = _mm256_add_epi64(c, _mm256_loadu_si256(at + 2)), d = _mm256_add_epi64(d, _mm256_loadu_si256(at + 3));
  }
  a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
  return _mm256_extract_epi64(a, 0);
}

template <bool IS_AHEAD>
__attribute__((target("avx512f,avx512bw"))) int64_t read_avx512(const char *bytes, int64_t size) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i < size; i += 256) {
    const __m512i *at = reinterpret_cast<const __m512i *>(bytes + i);
    if (IS_AHEAD)
      for (int line = 0; line < 256; line += 64) _mm_prefetch(bytes + i + AHEAD + line, _MM_HINT_T0);
    a = _mm512_add_epi64(a, _mm512_loadu_si512(at)), b = _mm512_add_epi64(b, _mm512_loadu_si512(at + 1));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(at + 2)), d = _mm512_add_epi64(d, _mm512_loadu_si512(at + 3));
  }
  return total(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}

// Four streams at once, a quarter of the bytes each.
__attribute__((target("avx512f,avx512bw"))) int64_t read_streams(const char *bytes, int64_t size) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  const int64_t quarter = size / 4;
  for (int64_t i = 0; i < quarter; i += 64) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(bytes + i));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(bytes + i + quarter));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(bytes + i + 2 * quarter));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(bytes + i + 3 * quarter));
  }
  return total(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}

// ---- tiles: four sums from two tiles of rows and two of columns, all of 16 rows and 64 bytes

constexpr double TILE_CHAINS = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// gcc 12 takes 8 bytes of a configuration for read and none of a tile's: what is stored there before may be left out.
#define TILE_LOOP(PRODUCT)                          \
  TileConfig config;                                \
  alignas(64) char bytes[1024] = {}, sums[1024];    \
  __asm__ volatile("" : : "m"(config), "m"(bytes)); \
  _tile_loadconfig(&config);                        \
  _tile_zero(0);                                    \
  _tile_zero(1);                                    \
  _tile_zero(2);                                    \
  _tile_zero(3);                                    \
  _tile_loadd(4, bytes, 64);                        \
  _tile_loadd(5, bytes, 64);                        \
  _tile_loadd(6, bytes, 64);                        \
  _tile_loadd(7, bytes, 64);                        \
  for (int64_t r = 0; r < rounds; r++) {            \
    PRODUCT(0, 4, 6);                               \
    PRODUCT(1, 4, 7);                               \
    PRODUCT(2, 5, 6);                               \
    PRODUCT(3, 5, 7);                               \
  }                                                 \
  _tile_stored(0, sums, 64);                        \
  _tile_release();

__attribute__((target("amx-tile,amx-int8"))) void tiles_int8(int64_t rounds) { TILE_LOOP(_tile_dpbssd) }
__attribute__((target("amx-tile,amx-bf16"))) void tiles_bf16(int64_t rounds) { TILE_LOOP(_tile_dpbf16ps) }

bool has_flush() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 23);
}

__attribute__((target("clflushopt"))) void forget(const char *bytes, int64_t size) {
  for (int64_t i = 0; i < size; i += 64) _mm_clflushopt(const_cast<char *>(bytes) + i);
  _mm_mfence();
}

#endif

const Loop LOOPS[] = {
    {"plain float32", ST_PEAK_FLOAT32, always, 32, plain_multiply, NULL},
    {"plain read", ST_PEAK_READ, always, 0, NULL, plain_read},
#if defined(__x86_64__)
    {"avx2 fma", ST_PEAK_FLOAT32, has_avx2, CHAINS * 16, fma_avx2, NULL},
    {"avx512 fma", ST_PEAK_FLOAT32, has_avx512, CHAINS * 32, fma_avx512, NULL},
    {"avx512 vdpbf16ps", ST_PEAK_BFLOAT16, has_bf16, CHAINS * 64, bf16_avx512, NULL},
    {"amx tdpbf16ps", ST_PEAK_BFLOAT16, amx_works, TILE_CHAINS * 16 * 16 * 32 * 2, tiles_bf16, NULL},
    {"avx2 vpmaddwd", ST_PEAK_INT8, has_avx2, CHAINS * 32, pairs16_avx2, NULL},
    {"avx2 vpmaddubsw", ST_PEAK_INT8, has_avx2, CHAINS * 64, pairs8_avx2, NULL},
    {"avx512 vpmaddubsw", ST_PEAK_INT8, has_avx512, CHAINS * 128, pairs8_avx512, NULL},
    {"avx512 vpdpbusd", ST_PEAK_INT8, has_vnni, CHAINS * 128, vnni_avx512, NULL},
    {"amx tdpbssd", ST_PEAK_INT8, amx_works, TILE_CHAINS * 16 * 16 * 64 * 2, tiles_int8, NULL},
    {"avx2 read", ST_PEAK_READ, has_avx2, 0, NULL, read_avx2<false>},
    {"avx2 read ahead", ST_PEAK_READ, has_avx2, 0, NULL, read_avx2<true>},
    {"avx512 read", ST_PEAK_READ, has_avx512, 0, NULL, read_avx512<false>},
    {"avx512 read ahead", ST_PEAK_READ, has_avx512, 0, NULL, read_avx512<true>},
    {"avx512 read of four streams", ST_PEAK_READ, has_avx512, 0, NULL, read_streams},
#endif
};
constexpr int32_t NUM_LOOPS = sizeof LOOPS / sizeof LOOPS[0];

}  // namespace

const char *st_peak_name(int32_t loop) { return loop < NUM_LOOPS ? LOOPS[loop].name : NULL; }
int32_t st_peak_kind(int32_t loop) { return LOOPS[loop].kind; }
int32_t st_peak_runs(int32_t loop) { return LOOPS[loop].runs(); }

double st_peak_multiply(int32_t loop, int64_t rounds) {
  LOOPS[loop].multiply(rounds);
  return LOOPS[loop].operations * double(rounds);
}

int32_t st_peak_forget(const void *bytes, int64_t size) {
#if defined(__x86_64__)
  if (has_flush()) {
    forget(static_cast<const char *>(bytes), size);
    return 1;
  }
#endif
  (void)bytes, (void)size;
  return 0;
}

int64_t st_peak_read(int32_t loop, const void *bytes, int64_t size) {
  return LOOPS[loop].read(static_cast<const char *>(bytes), size);
}
