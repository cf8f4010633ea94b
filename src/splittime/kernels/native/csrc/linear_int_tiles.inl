// The inner loops of linear_int.inl: R tokens times a panel of 16 output features, or four, over a chunk of columns. Those of
// int8 with groups are in linear_int_groups.inl.
//
// int8 without byte products (LANES 8): bytes widened to 16 bits and pmaddwd, exact, since the saturating byte product of
// AVX2 does not hold two products of full-range bytes. Its sums stay in pairs of lanes (columns 0, 1 and 2, 3 of each
// four) until the end. With VNNI (LANES 16): one byte product a register, sums whole; it costs no more than to load the
// activations for it, so four panels share each load.
// int4: byte products at any width; what they add up to in a block of 64 columns fits 16 bits (see tile4).
#pragma once
#include "pack_int.h"

namespace ST_ISA {


#if LANES == 16
typedef int8_t Wide;        // how an activation of an int8 product is kept
typedef U8 Weights;         // what they are multiplied with
constexpr int VECTORS8 = 1;  // registers of sums a token and panel
constexpr int PARTS = 1;    // passes over a panel when R is large
#else
typedef int16_t Wide;
typedef I16 Weights;
constexpr int VECTORS8 = 4;
constexpr int PARTS = 2;
#endif
constexpr int VECTORS4 = 16 / LANES;
constexpr int SUMS8 = VECTORS8 * LANES;   // integers a token and panel
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // tokens of a tile that fit the registers
constexpr int MOST_PANELS = LANES == 16 ? 4 : 1;  // of a tile of int8
constexpr int MAX_ROWS_ABREAST = 6;  // tokens of a tile of so many: 24 sums, 4 weights, 1 of activations
constexpr int MAX_PAIRS = LANES == 16 ? 8 : 4;  // the same where they split nibbles as well

inline __attribute__((always_inline)) I32 whole(I32 sum) { return sum; }
#if LANES == 16
typedef I32 Sum4;  // of an int4 product, in a block
inline __attribute__((always_inline)) I32 product(I32 sum, U8 w, I8 x) { return dot_u8(sum, w, x); }
#else
typedef I16 Sum4;
typedef int64_t I64 __attribute__((vector_size(LANES * 4)));
inline __attribute__((always_inline)) I32 product(I32 sum, I16 w, I16 x) { return sum + madd(w, x); }
inline __attribute__((always_inline)) I16 product(I16 sum, U8 w, I8 x) { return sum + madd_u8(w, x); }
inline __attribute__((always_inline)) I32 whole(I16 sum) { return madd(sum, I16{} + 1); }
inline __attribute__((always_inline)) I16 four(const int16_t *x) { return (I16)(I64{} + load<int64_t>(x)); }
#endif
inline __attribute__((always_inline)) I8 four(const int8_t *x) { return (I8)(I32{} + load<int32_t>(x)); }

#if defined(__AVX2__) && LANES == 8
#define ST_ADD(COUNT, BROADCAST, MULTIPLY, ADD)                                                                 \
  asm volatile(BROADCAST " %[x], %[t]\n\t" MULTIPLY " %[t], %[w], %[u]\n\t" MULTIPLY " %[t], %[z], %[t]\n\t" ADD \
                         " %[u], %[a], %[a]\n\t" ADD " %[t], %[b], %[b]"                                          \
               : [a] "+x"(sum[v]), [b] "+x"(sum[v + 1]), [t] "=&x"(t), [u] "=&x"(u)                             \
               : [w] "x"(w[v]), [z] "x"(w[v + 1]), [x] "m"(*(const X(*)[COUNT])x))
#endif

// sum[v] += w[v] * four activations of one token. In assembly where the order of these few instructions is worth a tenth
// to a third of the speed: GCC moves the products ahead, and then has no registers for them.
template <int V, class Sum, class W, class X>
inline __attribute__((always_inline)) void add_products(Sum (&sum)[V], const W (&w)[V], const X *x) {
#if defined(__AVX2__) && LANES == 8
  static_assert(V % 2 == 0, "two at a time");
  ST_UNROLL for (int v = 0; v < V; v += 2) {
    Sum t, u;
    if (sizeof(X) == 2)
      ST_ADD(4, "vpbroadcastq", "vpmaddwd", "vpaddd");
    else
      ST_ADD(4, "vpbroadcastd", "vpmaddubsw", "vpaddw");
  }
#else
  const auto activations = four(x);
#if defined(__AVX512VNNI__) && LANES == 16
  if (V > 1) {  // GCC 12 copies the sums of several panels, or spills them
    ST_UNROLL for (int v = 0; v < V; v++) asm("vpdpbusd %2, %1, %0" : "+v"(sum[v]) : "v"(w[v]), "v"(activations));
    return;
  }
#endif
  ST_UNROLL for (int v = 0; v < V; v++) sum[v] = product(sum[v], w[v], activations);
#endif
}

// Where a tile of int8 takes the weights of four columns from. Bytes: the blob. Widening: the blob, and what it widens it
// leaves for the tiles of the tokens that follow, the Words.
struct Bytes {
  static constexpr int STEP = 64;
  static constexpr bool KEEPS = false, FETCHES = true;
  static inline __attribute__((always_inline)) Weights get(const uint8_t *w, int v) {
#if LANES == 16
    return load<U8>(w);
#else
    typedef uint8_t U8h __attribute__((vector_size(LANES * 2)));
    return __builtin_convertvector(load<U8h>(w + 16 * v), I16);
#endif
  }
};
struct Widening : Bytes {
  static constexpr bool KEEPS = true;
};
struct Words {
  static constexpr int STEP = 128;
  static constexpr bool KEEPS = false, FETCHES = false;
  static inline __attribute__((always_inline)) Weights get(const uint8_t *w, int v) { return load<Weights>(w + 32 * v); }
};

// How far apart the panels of a tile are, their weights in bytes.
struct Apart {
  int64_t weights, sums;
};

// sums[r][v] += the products of R tokens and V registers of weights, over 4 * quads columns. The registers are those of
// one panel, or, with VNNI, of V panels. wide: where a Widening tile leaves them. ahead: bytes to fetch meanwhile.
template <int R, int V, class Source>
void tile8(const Wide *x, int64_t x_step, const uint8_t *w, int64_t quads, int32_t *sums, Apart apart, uint8_t *wide,
           const uint8_t *ahead) {
  constexpr int PANELS = LANES == 16 ? V : 1;
  const int64_t w_step = LANES == 16 ? apart.weights : 0, sums_step = LANES == 16 ? apart.sums : LANES;
  I32 sum[R][V];
  ST_UNROLL for (int r = 0; r < R; r++)
    ST_UNROLL for (int v = 0; v < V; v++) sum[r][v] = load<I32>(sums + r * SUMS8 + v * sums_step);
#if LANES == 8
#pragma GCC unroll 2
#endif
  for (int64_t q = 0; q < quads; q++) {
    Weights weights[V];
    ST_UNROLL for (int v = 0; v < V; v++) weights[v] = Source::get(w + v * w_step, v);
    ST_UNROLL for (int r = 0; r < R; r++) add_products(sum[r], weights, x + r * x_step);
    if (Source::KEEPS) {
      ST_UNROLL for (int v = 0; v < V; v++) store(wide + 32 * v, weights[v]);
      wide += Words::STEP;
    }
    if (Source::FETCHES) {
      constexpr int HINT = Source::KEEPS || PANELS > 2 ? 2 : 3;  // the second-level cache, where such fill the first
      ST_UNROLL for (int v = 0; v < PANELS; v++) __builtin_prefetch(ahead + v * w_step, 0, HINT);
      ahead += 64;
    }
    w += Source::STEP;
    x += 4;
  }
  ST_UNROLL for (int r = 0; r < R; r++)
    ST_UNROLL for (int v = 0; v < V; v++) store(sums + r * SUMS8 + v * sums_step, sum[r][v]);
}

// What a token's activations of a product in groups come with, a block of columns (128 at most, within a group).
struct Block {
  int32_t start;  // -8 (int8: -128) times their sum, in the form of the tile's sums
  float scale, sum;
};

inline __attribute__((always_inline)) F32 load_f16(const uint8_t *p) {
#if defined(__AVX512F__) && LANES == 16
  // (maskz: GCC 12 warns of the plain one's own header)
  return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)load<U16h>(p));
#elif defined(__F16C__) && LANES == 8
  return (F32)_mm256_cvtph_ps((__m128i)load<U16h>(p));
#else
  const U32 half = __builtin_convertvector(load<U16h>(p), U32);
  const F32 magnitude = (F32)((half & 0x7fff) << 13) * 0x1p112f;  // moves the exponent; right for subnormals too
  const U32 infinite = (U32)((half & 0x7c00) == 0x7c00) & 0x7f800000;
  return (F32)((U32)magnitude | infinite | (half & 0x8000) << 16);
#endif
}

// Where a tile of int4 takes the weights from, as above.
enum Nibbles { PAIRS, SPLITTING, SPLIT };

// The weights of a panel's blocks. `values`: pairs as in the blob, or what a SPLITTING tile left at `split`.
struct Blocks {
  const uint8_t *values, *scales, *zeros, *minima;
  uint8_t *split;
  int32_t first, count, a_group, quads;  // blocks of this chunk; blocks a group; four-column steps a block
  int32_t ahead;                         // bytes to fetch in a block's time: its share of all that a panel has
  const uint8_t *panel;
};

// Weights with ST_STEPS by their extras: what 256 columns of a panel have before their values, as `int_layout` puts it.
constexpr int FOUR_BITS = ST_STEPS | ST_MINIMA, FIVE_BITS = FOUR_BITS | ST_FIVE, SIX_BITS = ST_STEPS;
template <int EXTRAS> struct Stepped {
  static constexpr int BITS = EXTRAS == FOUR_BITS ? 4 : EXTRAS == FIVE_BITS ? 5 : 6, GROUPS = BITS == 6 ? 16 : 8;
  static constexpr int64_t SCALES_AT = BITS == 6 ? 32 : 64, MINIMA_AT = SCALES_AT + GROUPS * PANEL, VALUES_AT = 320;
  static constexpr int64_t BLOCK_BYTES = VALUES_AT + STEPPED * PANEL * BITS / 8;
  // Whether there is something else than values before block b of a chunk.
  static bool is_past_gap(int32_t b) { return EXTRAS & ST_STEPS && b > 0 && b % GROUPS == 0; }
};

// What LANES outputs of a group have. Loaded before the tokens' sums are stored, after which it would be loaded again.
template <int EXTRAS> struct Group {
  F32 scale, zero, minimum;

  inline __attribute__((always_inline)) Group(const Blocks &blocks, uint64_t group, int n) {
    if (EXTRAS & ST_STEPS) {
      typedef Stepped<EXTRAS> S;
      const uint8_t *block = blocks.panel + group / S::GROUPS * S::BLOCK_BYTES, *multiple = block + group % S::GROUPS * PANEL + n;
      scale = load_f16(block + 2 * n) * to_f32(widen_to_i32(multiple + S::SCALES_AT));
      if (EXTRAS & ST_MINIMA)  // all three products are exact, so it is the same however a compiler contracts them
        minimum = load_f16(block + 2 * (PANEL + n)) * to_f32(widen_to_i32(multiple + S::MINIMA_AT)) -
                  scale * (EXTRAS & ST_FIVE ? 16.0f : 8.0f);
      return;
    }
    const uint64_t at = group * PANEL + n;
    scale = load_f16(blocks.scales + 2 * at);
    if (EXTRAS & ST_ZEROS) zero = 8 - to_f32(widen_to_i32(blocks.zeros + at));
    if (EXTRAS & ST_MINIMA) minimum = load_f16(blocks.minima + 2 * at);
  }

  // sum + scale * (a block's products) - minimum * (its activations).
  inline __attribute__((always_inline)) F32 added(F32 sum, F32 dot, const Block &here) const {
    if (EXTRAS & ST_ZEROS) dot = fma(zero, splat(here.sum), dot);
    sum = fma(scale * splat(here.scale), dot, sum);
    if (EXTRAS & ST_MINIMA) sum = fma(minimum, splat(here.sum * -here.scale), sum);
    return sum;
  }
};

// A tile's sums in floats: in registers where they leave room for the integers, else in memory.
template <int R> struct Totals {
  static constexpr bool ARE_KEPT = LANES == 16 && R <= 8;
  F32 kept[ARE_KEPT ? R : 1][VECTORS4];
  float *sums;

  inline __attribute__((always_inline)) Totals(float *sums) : sums(sums) {
    if (ARE_KEPT)
      ST_UNROLL for (int r = 0; r < R; r++)
        ST_UNROLL for (int v = 0; v < VECTORS4; v++) kept[r][v] = load<F32>(sums + r * PANEL + v * LANES);
  }
  // A block's products, of tokens whose activations are about_step apart.
  template <int EXTRAS, class Sum>
  inline __attribute__((always_inline)) void add(const Blocks &blocks, int64_t group, const Sum (&sum)[R][VECTORS4],
                                                 const Block *about, int64_t about_step) {
    ST_UNROLL for (int v = 0; v < VECTORS4; v++) {
      const Group<EXTRAS> of_group(blocks, group, v * LANES);
      ST_UNROLL for (int r = 0; r < R; r++) {
        const F32 dot = to_f32(whole(sum[r][v]));
        float *to = sums + r * PANEL + v * LANES;
        if (ARE_KEPT)
          kept[r][v] = of_group.added(kept[r][v], dot, about[r * about_step]);
        else
          store(to, of_group.added(load<F32>(to), dot, about[r * about_step]));
      }
    }
    if (!ARE_KEPT) asm volatile("" ::: "memory");  // in registers they would drive out those of the next block
  }
  inline __attribute__((always_inline)) void leave() const {
    if (ARE_KEPT)
      ST_UNROLL for (int r = 0; r < R; r++)
        ST_UNROLL for (int v = 0; v < VECTORS4; v++) store(sums + r * PANEL + v * LANES, kept[r][v]);
  }
};

// sums[r][n] += scales * (the products of R tokens and a panel), over blocks.count blocks.
//
// At LANES 8 a lane adds up, modulo 2^16, 2 columns of each of 16 steps at most: 32 products of w in 0..15 and x, and
// -8 times the same x to begin with; that is 32 products (w - 8) x, of magnitude 8 * 127 * 32 = 32512 at most, so it fits.
// So do those of 5 bits in blocks of 32 columns, and of 6 bits in blocks of 16 (16 * 127 * 16, 32 * 127 * 8).
template <int R, Nibbles FROM, int EXTRAS>
void tile4(const int8_t *x, int64_t x_step, const Block *about, int64_t about_step, const Blocks &blocks, float *sums,
           const uint8_t *ahead) {
  constexpr int V = VECTORS4, BYTES = 4 * LANES;
  const uint8_t *w = blocks.values;
  uint8_t *split = blocks.split;
  int64_t group = blocks.first / blocks.a_group;
  int32_t left = blocks.a_group - blocks.first % blocks.a_group;  // blocks of this group
  Totals<R> totals(sums);
  const int32_t quads = EXTRAS & ST_STEPS ? STEPPED / Stepped<EXTRAS>::GROUPS / 4 : blocks.quads;
  for (int32_t b = 0; b < blocks.count; b++, about++) {
    Sum4 sum[R][V];
    if (FROM != SPLIT && Stepped<EXTRAS>::is_past_gap(b)) w += Stepped<EXTRAS>::VALUES_AT;
    if (FROM != SPLIT) __builtin_prefetch(ahead + 32 * quads, 0, FROM == PAIRS ? 3 : 2);  // what is not values
    ST_UNROLL for (int r = 0; r < R; r++)
      ST_UNROLL for (int v = 0; v < V; v++) sum[r][v] = (Sum4)splat(about[r * about_step].start);
#pragma GCC unroll 4
    for (int32_t q = 0; q < quads; q += 2) {
      U8 even[V], odd[V];
      ST_UNROLL for (int v = 0; v < V; v++) {
        even[v] = load<U8>(w + BYTES * v);
        if (FROM != SPLIT) odd[v] = even[v] >> 4, even[v] &= 15;
        if (FROM == SPLITTING) {
          store(split + BYTES * v, even[v]);
          store(split + 64 + BYTES * v, odd[v]);
        }
      }
      ST_UNROLL for (int r = 0; r < R; r++) add_products(sum[r], even, x + r * x_step);
      if (FROM == SPLIT)  // not before: both would not fit the registers
        ST_UNROLL for (int v = 0; v < V; v++) odd[v] = load<U8>(w + 64 + BYTES * v);
      ST_UNROLL for (int r = 0; r < R; r++) add_products(sum[r], odd, x + r * x_step + 4);
      if (FROM != SPLIT) __builtin_prefetch(ahead + 32 * q, 0, FROM == PAIRS ? 3 : 2);
      w += FROM == SPLIT ? 128 : 64;
      split += 128;
      x += 8;
    }
    if (left == 0) group++, left = blocks.a_group;
    left--;
    ahead += blocks.ahead;
    totals.template add<EXTRAS>(blocks, group, sum, about, about_step);
  }
  totals.leave();
}

}  // namespace ST_ISA
