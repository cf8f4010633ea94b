// The innermost part of the float products: a tile of R tokens times P panels, held in registers while it walks over
// one K block. bfloat16 is widened on the way (a shift or a mask for 8 or 16 weights), which hides behind the products:
// both formats reach 96 % of the FMA peak on a Zen 3.
#include <utility>

namespace ST_ISA {
namespace floats {

constexpr int PANEL = 16, VECTORS = PANEL / LANES, BLOCK = 256, LINE = 64;
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // accumulators: 24 of 32 registers, or 12 of 16

// sum += w * x. With 12 of 16 registers for sums, the compiler's choice among the three forms of the instruction ends
// in spills (a fifth of the speed); this form keeps each sum where it is.
inline __attribute__((always_inline)) void accumulate(F32 &sum, F32 w, F32 x) {
#if defined(__FMA__) && LANES == 8
  asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
  sum = w * x + sum;
#endif
}

// body(0), .., body(N - 1), each index a constant: plain loops are unrolled too late for their arrays to be registers.
template <class F, int... I>
inline __attribute__((always_inline)) void each(F &&body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> inline __attribute__((always_inline)) void each(F &&body) {
  each(body, std::make_integer_sequence<int, N>{});
}
#define ST_EACH(i, n) each<n>([&](auto i) __attribute__((always_inline))

// sum[i][r] += weights(i) * x[r], keeping the fewer of the two in registers.
template <int R, int N, class F>
inline __attribute__((always_inline)) void products(const float *x, F &&weights, F32 (&sum)[N][R]) {
  if constexpr (R < N) {
    F32 xs[R];
    ST_EACH(r, R) { xs[r] = splat(x[r * BLOCK]); });
    ST_EACH(i, N) {
      const F32 w = weights(i);
      ST_EACH(r, R) { accumulate(sum[i][r], w, xs[r]); });
    });
  } else {
    F32 ws[N];
    ST_EACH(i, N) { ws[i] = weights(i); });
    ST_EACH(r, R) {
      const F32 xr = splat(x[r * BLOCK]);
      ST_EACH(i, N) { accumulate(sum[i][r], ws[i], xr); });
    });
  }
}

// The formats. A step is the 64 bytes at `w` in each of P panels; the tokens' activations are WORDS_PER_BLOCK apart.
struct Float32 {
  static constexpr int K_PER_STEP = 1, WORDS_PER_BLOCK = BLOCK;
  typedef float Word;

  template <int R, int P>
  static inline __attribute__((always_inline)) void step(const Word *x, const uint8_t *w, int64_t panel_bytes,
                                                         F32 (&sum)[P * VECTORS][R]) {
    auto weights = [&](int i) __attribute__((always_inline)) {
      return load<F32>(w + i / VECTORS * panel_bytes + i % VECTORS * LANES * 4);
    };
    products<R, P * VECTORS>(x, weights, sum);
  }
  static void copy(const float *x, int64_t count, Word *to) { memcpy(to, x, count * sizeof(float)); }
};

// Two k a step, each weight widened to float32.
struct Bfloat16 {
  static constexpr int K_PER_STEP = 2, WORDS_PER_BLOCK = BLOCK;
  typedef float Word;

  template <int R, int P>
  static inline __attribute__((always_inline)) void step(const Word *x, const uint8_t *w, int64_t panel_bytes,
                                                         F32 (&sum)[P * VECTORS][R]) {
    auto pairs = [&](int i) __attribute__((always_inline)) {
      return load<U32>(w + i / VECTORS * panel_bytes + i % VECTORS * LANES * 4);
    };
    auto even = [&](int i) __attribute__((always_inline)) { return (F32)(pairs(i) << 16); };
    auto odd = [&](int i) __attribute__((always_inline)) { return (F32)(pairs(i) & 0xffff0000u); };
    products<R, P * VECTORS>(x, even, sum);
    asm("" : "+r"(w));  // load the pairs again, rather than keep them in registers that the sums need
    products<R, P * VECTORS>(x + 1, odd, sum);
  }
  static void copy(const float *x, int64_t count, Word *to) {
    memcpy(to, x, count * sizeof(float));
    if (count % 2) to[count] = 0;
  }
};

// The same with activations rounded to bfloat16 (ST_ROUNDED_ACTIVATIONS), on every instruction set: where the processor has
// an instruction for it, two k in one; elsewhere products of the rounded numbers in float32.
struct Bfloat16Pairs {
  static constexpr int K_PER_STEP = 2, WORDS_PER_BLOCK = BLOCK / 2;
  typedef uint32_t Word;  // two neighbouring k

  static inline __attribute__((always_inline)) F32 dot(F32 sum, U32 w, U32 x) {
#if defined(__AVX512BF16__) && LANES == 16
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    sum += (F32)(w & 0xffff0000u) * (F32)(x & 0xffff0000u);
    return sum + (F32)(w << 16) * (F32)(x << 16);
#endif
  }
  template <int R, int P>
  static inline __attribute__((always_inline)) void step(const Word *x, const uint8_t *w, int64_t panel_bytes,
                                                         F32 (&sum)[P * VECTORS][R]) {
    U32 pair[P * VECTORS];
    ST_EACH(i, P * VECTORS) { pair[i] = load<U32>(w + i / VECTORS * panel_bytes + i % VECTORS * LANES * 4); });
    ST_EACH(r, R) {
      const U32 xr = U32{} + x[r * WORDS_PER_BLOCK];
      ST_EACH(i, P * VECTORS) { sum[i][r] = dot(sum[i][r], pair[i], xr); });
    });
  }
  static void copy(const float *x, int64_t count, Word *to) {
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) store(to + k / 2, to_bf16(load<F32>(x + k)));
    for (; k < count; k += 2) to[k / 2] = bf16_of(x[k]) | (uint32_t)(k + 1 < count ? bf16_of(x[k + 1]) : 0) << 16;
  }
};

// One tile over one K block. sums: [P][rows apart by PANEL], panels `panel_sums` apart. A step also fetches the line at
// `next` of each panel, and moves `next` on by `next_stride`; and the next tile's activations (worth 3 to 6 % from 128
// tokens on).
template <class Word> struct TileCall {
  const Word *x;
  const uint8_t *w, *next;
  int64_t panel_bytes, panel_sums;
  int32_t steps, next_stride;
  bool is_first;
  float *sums;
};

template <class W, int R, int P> void tile(const TileCall<typename W::Word> &call) {
  F32 sum[P * VECTORS][R] = {};
  constexpr int words_per_step = W::K_PER_STEP * W::WORDS_PER_BLOCK / BLOCK;
  const typename W::Word *x = call.x, *next_x = x + R * W::WORDS_PER_BLOCK;
  const uint8_t *w = call.w, *next = call.next;
  const int64_t panel_bytes = call.panel_bytes;
  const int32_t next_stride = call.next_stride;
  for (int32_t step = 0; step < call.steps; step++) {
    ST_EACH(p, P) { __builtin_prefetch(next + p * panel_bytes); });
    if (R > 3) __builtin_prefetch(next_x);
    W::template step<R, P>(x, w, panel_bytes, sum);
    x += words_per_step;
    next_x += R * words_per_step;
    w += LINE;
    next += next_stride;
  }
  ST_EACH(i, P * VECTORS) {
    ST_EACH(r, R) {
      float *to = call.sums + i / VECTORS * call.panel_sums + r * PANEL + i % VECTORS * LANES;
      store(to, call.is_first ? sum[i][r] : load<F32>(to) + sum[i][r]);
    });
  });
}

// Panels of a tile: enough independent sums to hide the latency of the products (4 cycles times 2 a cycle).
constexpr int panels_of(int rows) {
  if (LANES == 16) return rows <= 2 ? 4 : 2;
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

template <class W> using Tile = void (*)(const TileCall<typename W::Word> &);

// The tile of `rows` tokens and of panels_of(`widest`) panels (or one), where widest is rows or rows + 1.
template <class W, int R = MAX_ROWS> Tile<W> tile_of(int rows, int panels) {
  if (rows == R) {
    if (panels == 1) return tile<W, R, 1>;
    return panels == panels_of(R) ? tile<W, R, panels_of(R)> : tile<W, R, panels_of(R + 1)>;
  }
  if constexpr (R > 1) return tile_of<W, R - 1>(rows, panels);
  return nullptr;
}

#undef ST_EACH
}  // namespace floats
}  // namespace ST_ISA
