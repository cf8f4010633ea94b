// The inner loop of int8 products in groups: sums of a block of columns in integers, exact, then in float32.
//
// Without byte products (LANES 8): the even and the odd bytes of a register of weights, as 16-bit integers, are columns 0
// and 2, and 1 and 3, of its outputs; with the activations in the order 0, 2, 1, 3 a sum needs no shuffling at its end, as
// the sums of tile8 do, which ends once a row and not once a block. With VNNI (LANES 16): as tile8.
#pragma once
#include "linear_int_tiles.inl"

namespace ST_ISA {

constexpr int MAX_GROUP_ROWS = LANES == 16 ? 12 : 6;

#if LANES == 8
// sum[v] += w[v] * two activations of one token.
template <class X>
inline __attribute__((always_inline)) void add_pairs(I32 (&sum)[2], const I16 (&w)[2], const X *x) {
#if defined(__AVX2__)
  constexpr int v = 0;
  I32 t, u;
  ST_ADD(2, "vpbroadcastd", "vpmaddwd", "vpaddd");
#else
  const I16 activations = (I16)(I32{} + load<int32_t>(x));
  for (int v = 0; v < 2; v++) sum[v] += madd(w[v], activations);
#endif
}
#endif

// sum[r] += the products of R tokens and a panel's weights of four columns.
template <int R>
inline __attribute__((always_inline)) void add_quad(I32 (&sum)[R][VECTORS4], const uint8_t *w, const Wide *x, int64_t x_step) {
#if LANES == 16
  const U8 weights[1] = {load<U8>(w)};
  ST_UNROLL for (int r = 0; r < R; r++) add_products(sum[r], weights, x + r * x_step);
#else
  typedef uint16_t U16 __attribute__((vector_size(LANES * 4)));
  const I16 even[2] = {(I16)(load<U16>(w) & 255), (I16)(load<U16>(w + 32) & 255)};
  ST_UNROLL for (int r = 0; r < R; r++) add_pairs(sum[r], even, x + r * x_step);
  const I16 odd[2] = {(I16)(load<U16>(w) >> 8), (I16)(load<U16>(w + 32) >> 8)};
  ST_UNROLL for (int r = 0; r < R; r++) add_pairs(sum[r], odd, x + r * x_step + 2);
#endif
}

// As tile4. A block is 128 columns at most, so that its sums (255 * 127 * 128 and what they begin with) are whole floats.
template <int R, int EXTRAS>
void tile8_groups(const Wide *x, int64_t x_step, const Block *about, int64_t about_step, const Blocks &blocks, float *sums,
                  const uint8_t *ahead) {
  const uint8_t *w = blocks.values;
  int64_t group = blocks.first / blocks.a_group;
  int32_t left = blocks.a_group - blocks.first % blocks.a_group;  // blocks of this group
  for (int32_t b = 0; b < blocks.count; b++, about++) {
    I32 sum[R][VECTORS4];
    ST_UNROLL for (int r = 0; r < R; r++)
      ST_UNROLL for (int v = 0; v < VECTORS4; v++) sum[r][v] = splat(about[r * about_step].start);
    for (int32_t q = 0; q < blocks.quads; q++, w += 64, x += 4, ahead += 64) {
      add_quad<R>(sum, w, x, x_step);
      __builtin_prefetch(ahead, 0, 3);
    }
    if (left == 0) group++, left = blocks.a_group;
    left--;
    ST_UNROLL for (int v = 0; v < VECTORS4; v++) {
      const Group<EXTRAS> of_group(blocks, group, v * LANES);
      ST_UNROLL for (int r = 0; r < R; r++)
        of_group.add(to_f32(sum[r][v]), about[r * about_step], sums + r * PANEL + v * LANES);
    }
    asm volatile("" ::: "memory");  // as in tile4
  }
}

}  // namespace ST_ISA
