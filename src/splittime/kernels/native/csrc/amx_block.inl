// The product that all kernels on AMX are made of: up to 32 rows times up to 32 columns, in up to four tiles of sums.
#pragma once
#include <type_traits>

#include "amx_tiles.h"

namespace ST_ISA {

// sums (+)= x w^T. A step multiplies 64 bytes (or fewer, see TileConfig) of each row of x with as many of each column of w; of
// w they lie as 16 lines, each with four bytes of every column. Strides and distances are in bytes; second_...: from the
// first 16 rows of x, or columns of w, to the second. x lies in `pieces` of `steps` steps each. The sums are 32-bit integers,
// or floats.
struct AmxCall {
  const uint8_t *x;
  int64_t x_stride, x_step, second_x, next_piece;
  const uint8_t *w;
  int64_t w_stride, second_w, steps, pieces = 1;
  void *sums;
  int64_t sum_stride, second_sums;
  bool is_first;         // sums begin at 0 and not at what is in memory
  const uint8_t *ahead;  // weights to fetch meanwhile into the second-level cache
  int64_t second_ahead, ahead_lines;  // cache lines a step
};

template <bool IS_FLOAT, int C, int A, int B> inline __attribute__((always_inline)) void tile_product() {
  if constexpr (IS_FLOAT)
    tile_product_bfloat16<C, A, B>();
  else
    tile_product_bytes<C, A, B>();
}

template <bool IS_FAR, int T> inline __attribute__((always_inline)) void load_weights(const uint8_t *w, int64_t stride) {
  if constexpr (IS_FAR)
    tile_load_far<T>(w, stride);
  else
    tile_load<T>(w, stride);
}

// Calls body(tile, address) for each tile of sums.
template <int ROWS, int COLUMNS, class F> inline __attribute__((always_inline)) void each_sum(const AmxCall &call, F &&body) {
  uint8_t *first = (uint8_t *)call.sums, *second = first + call.second_sums;
  const int64_t below = TILE_ROWS * call.sum_stride;
  body(std::integral_constant<int, 4>(), first);
  if (COLUMNS == 2) body(std::integral_constant<int, 5>(), second);
  if (ROWS == 2) body(std::integral_constant<int, 6>(), first + below);
  if (ROWS == 2 && COLUMNS == 2) body(std::integral_constant<int, 7>(), second + below);
}

// ROWS, COLUMNS: in tiles of 16. IS_FAR: the weights come from the second-level cache, and should not drive x out of the first.
template <bool IS_FLOAT, bool IS_FAR, int ROWS, int COLUMNS> void amx_block(const AmxCall &call) {
  each_sum<ROWS, COLUMNS>(call, [&](auto tile, uint8_t *at) {
    if (call.is_first)
      tile_zero<tile>();
    else
      tile_load<tile>(at, call.sum_stride);
  });
  const uint8_t *w = call.w, *ahead = call.ahead;
  const int64_t x_stride = call.x_stride, x_step = call.x_step, w_stride = call.w_stride, second = call.second_w;
  for (int64_t piece = 0; piece < call.pieces; piece++) {
    const uint8_t *x = call.x + piece * call.next_piece;
    for (int64_t step = 0; step < call.steps; step++, x += x_step, w += 16 * w_stride) {
      for (int64_t line = 0; line < call.ahead_lines; line++, ahead += 64) {
        __builtin_prefetch(ahead, 0, 2);
        if (COLUMNS == 2) __builtin_prefetch(ahead + call.second_ahead, 0, 2);
      }
      tile_load<0>(x, x_stride);
      load_weights<IS_FAR, 2>(w, w_stride);
      tile_product<IS_FLOAT, 4, 0, 2>();
      if (COLUMNS == 2) load_weights<IS_FAR, 3>(w + second, w_stride), tile_product<IS_FLOAT, 5, 0, 3>();
      if (ROWS == 2) tile_load<1>(x + call.second_x, x_stride), tile_product<IS_FLOAT, 6, 1, 2>();
      if (ROWS == 2 && COLUMNS == 2) tile_product<IS_FLOAT, 7, 1, 3>();
    }
  }
  each_sum<ROWS, COLUMNS>(call, [&](auto tile, uint8_t *at) { tile_store<tile>(at, call.sum_stride); });
}

typedef void (*AmxBlock)(const AmxCall &);

// rows: of x, 1 to 32; columns: in tiles of 16.
template <bool IS_FLOAT, bool IS_FAR> inline AmxBlock amx_block_of(int64_t rows, int64_t columns) {
  if (rows > TILE_ROWS) return columns == 2 ? amx_block<IS_FLOAT, IS_FAR, 2, 2> : amx_block<IS_FLOAT, IS_FAR, 2, 1>;
  return columns == 2 ? amx_block<IS_FLOAT, IS_FAR, 1, 2> : amx_block<IS_FLOAT, IS_FAR, 1, 1>;
}

}  // namespace ST_ISA
