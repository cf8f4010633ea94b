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

#if LANES == 16
// As tile4, for integers of 5 or 6 bits.
template <int R, int EXTRAS>
void tile_folded(const int8_t *x, int64_t x_step, const Block *about, int64_t about_step, const Blocks &blocks, float *sums,
                 const uint8_t *ahead) {
  typedef Stepped<EXTRAS> S;
  constexpr int QUADS = Folded<S::BITS>::QUADS, LINES = Folded<S::BITS>::LINES;  // which are a block
  const uint8_t *w = blocks.values;
  Totals<R> totals(sums);
  for (int32_t b = 0; b < blocks.count; b++, about++) {
    if (S::is_past_gap(b)) w += S::VALUES_AT;
    I32 sum[R][VECTORS4];
    ST_UNROLL for (int r = 0; r < R; r++) sum[r][0] = splat(about[r * about_step].start);
    U32 lines[LINES], quads[QUADS];
    ST_UNROLL for (int i = 0; i < LINES; i++) lines[i] = load<U32>(w + 64 * i);
    spread_lines(lines, quads);
    ST_UNROLL for (int i = 0; i < QUADS; i++) {
      const U8 weights[1] = {(U8)quads[i]};
      ST_UNROLL for (int r = 0; r < R; r++) add_products(sum[r], weights, x + r * x_step + 4 * i);
    }
    w += 64 * LINES, x += 4 * QUADS;
    ST_UNROLL for (int i = 0; i <= LINES; i++) __builtin_prefetch(ahead + 64 * i, 0, 3);
    ahead += blocks.ahead;
    totals.template add<EXTRAS>(blocks, blocks.first + b, sum, about, about_step);
  }
  totals.leave();
}
#endif

// Integers of BITS bits of some 256 columns, less the gaps between them, as bytes: what tile4 takes for SPLIT.
template <int BITS> inline void unfold(const Blocks &blocks, int64_t columns, const uint8_t *ahead, uint8_t *to) {
  constexpr int QUADS = Folded<BITS>::QUADS, LINES = Folded<BITS>::LINES;
  const uint8_t *w = blocks.values;
  for (int64_t k = 0; k < columns; k += STEPPED, w += Stepped<SIX_BITS>::VALUES_AT)
    for (int64_t q = 0; q < STEPPED / 4; q += QUADS, w += 64 * LINES, ahead += 64 * LINES, to += 64 * QUADS) {
      ST_UNROLL for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + 64 * i, 0, 2);
      ST_UNROLL for (int v = 0; v < VECTORS4; v++) {
        U32 lines[LINES], quads[QUADS];
        ST_UNROLL for (int i = 0; i < LINES; i++) lines[i] = load<U32>(w + 64 * i + 4 * LANES * v);
        spread_lines(lines, quads);
        ST_UNROLL for (int i = 0; i < QUADS; i++) store(to + 64 * i + 4 * LANES * v, quads[i]);
      }
    }
}

// As tile4. A block is 128 columns at most, so that its sums (255 * 127 * 128 and what they begin with) are whole floats.
template <int R, int EXTRAS>
void tile8_groups(const Wide *x, int64_t x_step, const Block *about, int64_t about_step, const Blocks &blocks, float *sums,
                  const uint8_t *ahead) {
  const uint8_t *w = blocks.values;
  int64_t group = blocks.first / blocks.a_group;
  int32_t left = blocks.a_group - blocks.first % blocks.a_group;  // blocks of this group
  Totals<R> totals(sums);
  for (int32_t b = 0; b < blocks.count; b++, about++) {
    I32 sum[R][VECTORS4];
    ST_UNROLL for (int r = 0; r < R; r++)
      ST_UNROLL for (int v = 0; v < VECTORS4; v++) sum[r][v] = splat(about[r * about_step].start);
    for (int32_t q = 0; q < blocks.quads; q++, w += 64, x += 4) {
      add_quad<R>(sum, w, x, x_step);
      __builtin_prefetch(ahead + 64 * q, 0, 3);
    }
    __builtin_prefetch(ahead + 64 * blocks.quads, 0, 3);  // what is not values
    ahead += blocks.ahead;
    if (left == 0) group++, left = blocks.a_group;
    left--;
    totals.template add<EXTRAS>(blocks, group, sum, about, about_step);
  }
  totals.leave();
}

}  // namespace ST_ISA
