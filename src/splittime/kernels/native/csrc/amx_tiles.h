// Tiles of AMX: eight registers of 16 rows of 64 bytes, and products of two of them. (In the other kernels a tile is a block
// of sums in vector registers.) The instructions are assembly, because the compiler's intrinsics take no template argument
// for a tile's number. With ST_EMULATED the same functions are plain C++, so that the kernels on top of them run, and are
// tested, on any processor.
//
// Each tile has one use everywhere: 0 and 1 hold activations (16 tokens each), 2 and 3 weights (16 outputs each), 4 to 7 sums:
// 4 = 0 x 2, 5 = 0 x 3, 6 = 1 x 2, 7 = 1 x 3. All have 16 rows. Where there are fewer tokens, the other rows are computed too
// and their results are thrown away: memory takes longer to bring the weights than the whole product takes.
#pragma once
#include <stdint.h>
#include <string.h>

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
template <int T> void tile_store(void *to, int64_t stride) {
  for (int r = 0; r < emulated.config.rows[T]; r++)
    memcpy((uint8_t *)to + r * stride, emulated.data[T][r], emulated.config.row_bytes[T]);
}
template <int C, int A, int B> void tile_product_bytes() {
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      int32_t sum;
      memcpy(&sum, &emulated.data[C][m][4 * n], 4);
      for (int k = 0; k < emulated.config.row_bytes[A]; k++)
        sum += (int8_t)emulated.data[A][m][k] * emulated.data[B][k / 4][4 * n + k % 4];
      memcpy(&emulated.data[C][m][4 * n], &sum, 4);
    }
}
// TDPBF16PS adds the even and the odd products up apart, then both to each other, then that to the sum.
template <int C, int A, int B> void tile_product_bfloat16() {
  const auto at = [](const uint8_t *pair, int i) {
    uint16_t half;
    memcpy(&half, pair + 2 * i, 2);
    return f32_of_bf16(half);
  };
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum, halves[2] = {0, 0};
      for (int k = 0; k < emulated.config.row_bytes[A] / 4; k++)
        for (int i = 0; i < 2; i++)
          halves[i] += at(&emulated.data[A][m][4 * k], i) * at(&emulated.data[B][k][4 * n], i);
      memcpy(&sum, &emulated.data[C][m][4 * n], 4);
      sum += halves[0] + halves[1];
      memcpy(&emulated.data[C][m][4 * n], &sum, 4);
    }
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
template <int T> inline __attribute__((always_inline)) void tile_store(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// Signed bytes of A times unsigned bytes of B.
template <int C, int A, int B> inline __attribute__((always_inline)) void tile_product_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> inline __attribute__((always_inline)) void tile_product_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace ST_ISA
