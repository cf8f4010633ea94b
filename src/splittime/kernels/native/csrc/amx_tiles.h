// Tiles of AMX: eight registers of 16 rows of 64 bytes, and products of two of them. (In the other kernels a tile is a block
// of sums in vector registers.) The instructions are assembly, because the compiler's intrinsics take no template argument
// for a tile's number. With ST_EMULATED the same functions are plain C++, so that the kernels on top of them run, and are
// tested, on any processor.
//
// Each tile has one use everywhere: 0 and 1 hold activations (16 tokens each), 2 and 3 weights (16 outputs each), 4 to 7 sums:
// 4 = 0 x 2, 5 = 0 x 3, 6 = 1 x 2, 7 = 1 x 3. All have 16 rows, but weights a quarter of `depth`. Where there are fewer tokens, the other rows are computed too
// and their results are thrown away: memory takes longer to bring the weights than the whole product takes.
#pragma once
#include <stdint.h>
#include <string.h>

#include "wide.h"

namespace ST_ISA {

// What LDTILECFG reads. (Intel's Software Developer's Manual, volume 1, chapter 18.)
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // depth: bytes of a token that one product takes, a multiple of 4 up to 64.
  explicit TileConfig(int depth) {
    for (int i = 0; i < 8; i++) row_bytes[i] = i < 2 ? depth : 64, rows[i] = i == 2 || i == 3 ? depth / 4 : 16;
  }
};
static_assert(sizeof(TileConfig) == 64);

#ifdef ST_EMULATED

struct EmulatedTiles {
  TileConfig config{64};
  uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles emulated;

inline void tiles_begin(int depth) {
  emulated.config = TileConfig(depth);
  memset(emulated.data, 0, sizeof emulated.data);
}
inline void tiles_end() {}
template <int T> void tile_zero() { memset(emulated.data[T], 0, 1024); }
template <int T> void tile_load(const void *from, int64_t stride) {
  memset(emulated.data[T], 0, 1024);
  for (int r = 0; r < emulated.config.rows[T]; r++)
    memcpy(emulated.data[T][r], (const uint8_t *)from + r * stride, emulated.config.row_bytes[T]);
}
template <int T> void tile_load_far(const void *from, int64_t stride) { tile_load<T>(from, stride); }
template <int T> void tile_store(void *to, int64_t stride) {
  for (int r = 0; r < emulated.config.rows[T]; r++)
    memcpy((uint8_t *)to + r * stride, emulated.data[T][r], emulated.config.row_bytes[T]);
}

// sums[m][n] += a[m] * b[n] for 16 tokens m and 16 outputs n; depth: bytes of a token. The innermost loop is one that a
// compiler makes vectors of: tests on processors without tiles spend most of their time here.
using TileBytes = uint8_t[16][64];
template <class Weight> static INLINE void multiply_bytes(TileBytes &sums, const TileBytes &a, const TileBytes &b, int depth) {
  for (int m = 0; m < 16; m++) {
    int32_t sum[16];
    memcpy(sum, sums[m], 64);
    for (int k = 0; k < depth; k++) {
      uint32_t weights[16];
      memcpy(weights, b[k / 4], 64);
      for (int n = 0; n < 16; n++) sum[n] += (int8_t)a[m][k] * (Weight)(weights[n] >> 8 * (k % 4));
    }
    memcpy(sums[m], sum, 64);
  }
}
static WIDE void multiply_unsigned(TileBytes &sums, const TileBytes &a, const TileBytes &b, int depth) {
  multiply_bytes<uint8_t>(sums, a, b, depth);
}
static WIDE void multiply_signed(TileBytes &sums, const TileBytes &a, const TileBytes &b, int depth) {
  multiply_bytes<int8_t>(sums, a, b, depth);
}
// TDPBF16PS adds the even and the odd products up apart, then both to each other, then that to the sum. A product of two
// bfloat16 is exact in float32, so it makes no difference whether a compiler joins it with its addition.
static WIDE void multiply_bfloat16(TileBytes &sums, const TileBytes &a, const TileBytes &b, int depth) {
  for (int m = 0; m < 16; m++) {
    float sum[16], halves[2][16] = {};
    memcpy(sum, sums[m], 64);
    for (int k = 0; k < depth / 2; k++) {
      uint32_t weights[16];
      memcpy(weights, b[k / 2], 64);
      uint16_t half;
      memcpy(&half, &a[m][2 * k], 2);
      const float token = f32_of_bf16(half);
      for (int n = 0; n < 16; n++) {
        const uint32_t bits = k % 2 ? weights[n] & 0xffff0000u : weights[n] << 16;
        float weight;
        memcpy(&weight, &bits, 4);
        halves[k % 2][n] += token * weight;
      }
    }
    for (int n = 0; n < 16; n++) sum[n] += halves[0][n] + halves[1][n];
    memcpy(sums[m], sum, 64);
  }
}
template <int C, int A, int B> void tile_product_bytes() {
  multiply_unsigned(emulated.data[C], emulated.data[A], emulated.data[B], emulated.config.row_bytes[A]);
}
template <int C, int A, int B> void tile_product_signed() {
  multiply_signed(emulated.data[C], emulated.data[A], emulated.data[B], emulated.config.row_bytes[A]);
}
template <int C, int A, int B> void tile_product_bfloat16() {
  multiply_bfloat16(emulated.data[C], emulated.data[A], emulated.data[B], emulated.config.row_bytes[A]);
}

#else

// Called anew before each use: torch's own products configure the tiles of the same threads.
inline void tiles_begin(int depth) {
  const TileConfig config(depth);
  asm volatile("ldtilecfg %0" : : "m"(config));
}
// Once the tiles are released, a switch of threads has 8 KB less to save.
inline void tiles_end() { asm volatile("tilerelease"); }
template <int T> inline __attribute__((always_inline)) void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> inline __attribute__((always_inline)) void tile_load(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
// With the hint that the lines need not stay in the first-level cache.
template <int T> inline __attribute__((always_inline)) void tile_load_far(const void *from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> inline __attribute__((always_inline)) void tile_store(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// Signed bytes of A times unsigned bytes of B.
template <int C, int A, int B> inline __attribute__((always_inline)) void tile_product_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// Signed bytes times signed bytes.
template <int C, int A, int B> inline __attribute__((always_inline)) void tile_product_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> inline __attribute__((always_inline)) void tile_product_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace ST_ISA
