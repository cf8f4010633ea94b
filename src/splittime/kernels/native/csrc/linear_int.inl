// y = x W^T for integer weights. Activations are rounded to int8 once and laid out for the tiles; then threads take items
// of some panels and some tokens. A token's sums run over the same chunks and blocks of columns whatever the tile, so
// its result depends on nothing else.
#include "linear_int_tiles.inl"

#include <math.h>

#include <utility>

namespace ST_ISA {

constexpr int64_t CHUNK = 512;          // columns at a time: their weights in L1, many tokens' activations in L2
constexpr int64_t MOST_TOKENS = 512;    // rounded at a time, which bounds the scratch memory
constexpr int64_t ITEM_TOKENS = 128;    // of an item: their chunk of activations stays in L2
constexpr int64_t DIRECT4 = 12;         // up to here, tiles split nibbles themselves; beyond, the first does for all
constexpr int64_t ORDERED_TOKENS = 32;  // up to here, weights are read in the order of memory

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Round to integers, ties to even. Beyond 127 there is only what comes of an infinity or a NaN: any number will do.
inline __attribute__((always_inline)) I32 rounded(F32 v) {
  v = v < 128 ? v : F32{};
  v = v > -128 ? v : F32{};
#if defined(__AVX512F__) && LANES == 16
  return (I32)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#elif defined(__AVX2__) && LANES == 8
  return (I32)_mm256_cvtps_epi32((__m256)v);
#else
  const F32 shifted = v + 12582912.0f;  // 1.5 * 2^23: no room for a fraction
  return (I32)shifted - 0x4b400000;
#endif
}

inline F32 load_some(const float *p, int64_t count) {
  if (count >= LANES) return load<F32>(p);
  F32 v{};
  if (count > 0) memcpy(&v, p, count * sizeof(float));
  return v;
}

// The largest magnitude; NaN if there is one (bit patterns sort like magnitudes, with NaN above infinity).
inline float largest(const float *x, int64_t count) {
  I32 most{};
  for (int64_t i = 0; i < count; i += LANES) {
    const I32 bits = (I32)load_some(x + i, count - i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t found = 0;
  for (int i = 0; i < LANES; i++) found = most[i] > found ? most[i] : found;
  float magnitude;
  memcpy(&magnitude, &found, 4);
  return magnitude;
}

// What to multiply with to get integers of -127..127. Below 1e-30 all round to 0, which keeps it finite.
inline float inverse_scale(float largest) { return largest < 1e-30f ? 0 : 127 / largest; }

// Tokens' activations, rounded, in chunks of columns: [chunk][token][columns of the chunk].
struct Activations {
  int64_t tokens, columns;
  uint8_t *values;
  float *scales;    // int8: [token]
  int32_t *starts;  // int8: [token], -128 times the sum
  Block *blocks;    // int4: [chunk][token][blocks of the chunk]
  int32_t block;    // int4: columns of a block

  int64_t width(int64_t chunk) const { return columns - chunk * CHUNK < CHUNK ? columns - chunk * CHUNK : CHUNK; }
  int64_t at(int64_t chunk, int64_t token) const { return chunk * CHUNK * tokens + token * width(chunk); }
};

// The place of column k, for a store of up to LANES columns from there.
template <class T> inline T *place(const Activations &a, int64_t token, int64_t k) {
  return (T *)a.values + a.at(k / CHUNK, token) + k % CHUNK;
}

inline void round_token8(const Activations &a, int64_t token, const float *x, int64_t in) {
  const float most = largest(x, in), inverse = inverse_scale(most);
  I32 sum{};
  for (int64_t k = 0; k < a.columns; k += LANES) {
    const I32 v = rounded(load_some(x + k, in - k) * inverse);
    sum += v;
#if LANES == 16
    store(place<Wide>(a, token, k), __builtin_convertvector(v, I8q));
#else
    store(place<Wide>(a, token, k), __builtin_convertvector(v, I16h));
#endif
  }
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total += sum[i];
  a.scales[token] = most / 127;
  a.starts[token] = (int32_t)(-128u * (uint32_t)total);
}

// The beginning of a block's sums: at LANES 8 two of 16 bits, of columns 0, 1 and of columns 2, 3 of each four.
inline Block block_of(I32 sum, float scale) {
  int32_t halves[2] = {0, 0};
  for (int i = 0; i < LANES; i++) halves[i % 4 / 2] += sum[i];
  Block block;
  block.scale = scale;
  block.sum = (float)(halves[0] + halves[1]);
#if LANES == 16
  block.start = -8 * (halves[0] + halves[1]);
#else
  const int16_t starts[2] = {(int16_t)(-8 * halves[0]), (int16_t)(-8 * halves[1])};
  memcpy(&block.start, starts, 4);
#endif
  return block;
}

inline void round_token4(const Activations &a, int64_t token, const float *x, int64_t in, int64_t group) {
  for (int64_t begin = 0; begin < a.columns; begin += group) {
    const float most = largest(x + begin, in - begin < group ? in - begin : group), inverse = inverse_scale(most);
    for (int64_t from = begin; from < begin + group; from += a.block) {
      I32 sum{};
      for (int64_t k = from; k < from + a.block; k += LANES) {
        const I32 v = rounded(load_some(x + k, in - k) * inverse);
        sum += v;
        store(place<int8_t>(a, token, k), __builtin_convertvector(v, I8q));
      }
      a.blocks[a.at(from / CHUNK, token) / a.block + from % CHUNK / a.block] = block_of(sum, most / 127);
    }
  }
}

// One call, for all of its items.
struct IntProduct {
  const StLinear &weight;
  IntLayout layout;
  Activations x;
  const float *residual;
  int64_t residual_step, y_step;
  float *y;

  int64_t chunks() const { return (layout.columns + CHUNK - 1) / CHUNK; }
  const uint8_t *panel(int64_t p) const { return weight.blob + p * layout.panel_bytes; }
  const uint8_t *values(int64_t p, int64_t chunk) const {
    return panel(p) + layout.values_at + chunk * CHUNK * PANEL / (weight.scheme == ST_INT8 ? 1 : 2);
  }
};

typedef void (*Tile8)(const Wide *, int64_t, const uint8_t *, int64_t, int32_t *, uint8_t *, const uint8_t *);
typedef void (*Tile4)(const int8_t *, int64_t, const Block *, int64_t, const Blocks &, float *, const uint8_t *);

// The tiles of R = 1, 2, ... tokens.
template <class Source, int V, int... R> inline Tile8 tile8_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile8 TILES[] = {tile8<R + 1, V, Source>...};
  return TILES[rows - 1];
}
template <Nibbles FROM, bool ZEROS, int... R> inline Tile4 tile4_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile4 TILES[] = {tile4<R + 1, FROM, ZEROS>...};
  return TILES[rows - 1];
}

// body(first, rows): `tokens` in the fewest tiles, of equal size or one apart.
template <class F> inline void in_tiles(int64_t tokens, int most, F &&body) {
  const int64_t tiles = (tokens + most - 1) / most;
  for (int64_t i = 0, first = 0; i < tiles; i++) {
    const int64_t rows = tokens / tiles + (i < tokens % tiles);
    body(first, (int)rows);
    first += rows;
  }
}

// Tokens [begin, begin + tokens) times panel p over one chunk of columns. sums: [tokens][SUMS8]. wide: room for the chunk.
inline void chunk8(const IntProduct &c, int64_t p, int64_t chunk, int64_t begin, int64_t tokens, uint8_t *wide,
                   int32_t *sums, const uint8_t *next) {
  constexpr int V = VECTORS8 / PARTS;
  constexpr auto ROWS = std::make_integer_sequence<int, MAX_ROWS>();
  const int64_t width = c.x.width(chunk);
  const uint8_t *w = c.values(p, chunk);
  const Wide *x = (const Wide *)c.x.values + c.x.at(chunk, begin);
  if (tokens <= 2)
    return tile8_of<Bytes, VECTORS8>((int)tokens, std::make_integer_sequence<int, 2>())(x, width, w, width / 4, sums, wide,
                                                                                        next);
  const bool widens = LANES != 16 && tokens > MAX_ROWS;
  in_tiles(tokens, MAX_ROWS, [&](int64_t first, int rows) {
    const bool is_wide = widens && first > 0;
    const Tile8 tile = is_wide  ? tile8_of<Words, V>(rows, ROWS)
                       : widens ? tile8_of<Widening, V>(rows, ROWS)
                                : tile8_of<Bytes, V>(rows, ROWS);
    for (int part = 0; part < PARTS; part++)
      tile(x + first * width, width, is_wide ? wide + 64 * part : w + 32 * part, width / 4,
           sums + first * SUMS8 + part * V * LANES, wide + 64 * part, next);
  });
}

template <Nibbles FROM, int MOST> inline Tile4 tile4_for(bool zeros, int rows) {
  constexpr auto ROWS = std::make_integer_sequence<int, MOST>();
  return zeros ? tile4_of<FROM, true>(rows, ROWS) : tile4_of<FROM, false>(rows, ROWS);
}

inline void chunk4(const IntProduct &c, int64_t p, int64_t chunk, int64_t begin, int64_t tokens, uint8_t *split,
                   float *sums, const uint8_t *next) {
  const int64_t width = c.x.width(chunk), block = c.x.block, blocks_of_chunk = width / block;
  const int8_t *x = (const int8_t *)c.x.values + c.x.at(chunk, begin);
  const Block *about = c.x.blocks + c.x.at(chunk, begin) / block;
  const bool zeros = c.weight.has_zeros;
  Blocks blocks;
  blocks.values = c.values(p, chunk), blocks.scales = c.panel(p), blocks.zeros = c.panel(p) + c.layout.zeros_at;
  blocks.split = split, blocks.first = (int32_t)(chunk * CHUNK / block), blocks.count = (int32_t)blocks_of_chunk;
  blocks.a_group = (int32_t)(c.weight.group / block), blocks.quads = (int32_t)(block / 4);
  const auto run = [&](Tile4 tile, int64_t first) {
    tile(x + first * width, width, about + first * blocks_of_chunk, blocks_of_chunk, blocks, sums + first * PANEL, next);
  };
  if (tokens <= DIRECT4)
    return in_tiles(tokens, MAX_PAIRS,
                    [&](int64_t first, int rows) { run(tile4_for<PAIRS, MAX_PAIRS>(zeros, rows), first); });
  run(tile4_for<SPLITTING, MAX_PAIRS>(zeros, MAX_PAIRS), 0);
  blocks.values = split;
  in_tiles(tokens - MAX_PAIRS, MAX_ROWS,
           [&](int64_t first, int rows) { run(tile4_for<SPLIT, MAX_ROWS>(zeros, rows), first + MAX_PAIRS); });
}

// The whole sum of output features [n, n + LANES) of a panel, from a token's sums of its part.
inline I32 whole8(const int32_t *sums, int n) {
#if LANES == 16
  return load<I32>(sums + n);
#else
  const I32 a = load<I32>(sums + 2 * n), b = load<I32>(sums + 2 * n + LANES);
  const I32 even = {0, 2, 4, 6, 8, 10, 12, 14}, odd = {1, 3, 5, 7, 9, 11, 13, 15};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#endif
}

// A panel's results for one token: + bias + residual, at their place.
template <class F> inline void finish(const IntProduct &c, int64_t p, int64_t token, F &&result) {
  for (int n = 0; n < PANEL; n += LANES) {
    const int64_t at = p * PANEL + n, count = c.weight.out_features - at;
    if (count <= 0) return;
    F32 v = result(n);
    if (c.weight.bias) v += load_some(c.weight.bias + at, count);
    if (c.residual) v += load_some(c.residual + token * c.residual_step + at, count);
    float *to = c.y + token * c.y_step + at;
    if (count >= LANES)
      store(to, v);
    else
      memcpy(to, &v, count * sizeof(float));
  }
}

// Panels [first, last) for tokens [begin, begin + tokens).
inline void int_item(const IntProduct &c, int64_t first, int64_t last, int64_t begin, int64_t tokens) {
  static thread_local Room<uint8_t> scratch;
  const bool is_int8 = c.weight.scheme == ST_INT8;
  const int64_t panel_sums = tokens * (is_int8 ? SUMS8 : PANEL);  // of 4 bytes each, integers or floats
  // Few tokens: panel by panel, in the order of memory. Many: chunk by chunk, so that activations stay in the cache.
  const int64_t together = tokens <= ORDERED_TOKENS ? 1 : last - first;
  uint8_t *prepared = scratch.of(CHUNK * PANEL * 2 + together * panel_sums * 4);
  uint8_t *sums = prepared + CHUNK * PANEL * 2;
  for (; first < last; first += together) {
    memset(sums, 0, together * panel_sums * 4);
    for (int64_t chunk = 0; chunk < c.chunks(); chunk++)
      for (int64_t i = 0; i < together; i++) {
        // what comes next, fetched meanwhile (past the end of the item it does no harm)
        const uint8_t *next = i + 1 < together ? c.values(first + i + 1, chunk)
                              : chunk + 1 < c.chunks() ? c.values(first, chunk + 1) : c.panel(first + together);
        if (is_int8)
          chunk8(c, first + i, chunk, begin, tokens, prepared, (int32_t *)sums + i * panel_sums, next);
        else
          chunk4(c, first + i, chunk, begin, tokens, prepared, (float *)sums + i * panel_sums, next);
      }
    for (int64_t i = 0; i < together; i++)
      for (int64_t t = 0; t < tokens; t++) {
        const float *scales = (const float *)c.panel(first + i);
        if (is_int8)
          finish(c, first + i, begin + t, [&](int n) {
            const int32_t *from = (const int32_t *)sums + i * panel_sums + t * SUMS8;
            return to_f32(whole8(from, n) + c.x.starts[begin + t]) * load<F32>(scales + n) * c.x.scales[begin + t];
          });
        else
          finish(c, first + i, begin + t,
                 [&](int n) { return load<F32>((const float *)sums + i * panel_sums + t * PANEL + n); });
      }
  }
}

// How many items to cut panels into: enough for the threads to even out, none too small to be worth a hand-over.
inline int64_t panel_items(const IntLayout &layout, int64_t tokens, int64_t token_parts) {
  const int64_t work = layout.panel_bytes * (tokens < 8 ? 8 : tokens) / 8;  // in bytes read at batch 1, about
  const int64_t least = (32768 + work - 1) / work;                          // panels of an item
  const int64_t wanted = 16 * pool_threads() / token_parts + 1;
  int64_t each = layout.panels / wanted;
  each = each < least ? least : each;
  each = tokens > ORDERED_TOKENS && each > 8 ? 8 : each;
  each = each < 1 ? 1 : each;
  return (layout.panels + each - 1) / each;
}

void linear_int(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
                int64_t y_stride) {
  static thread_local Room<uint8_t> scratch;
  const int64_t in = weight->in_features, residual_stride = residual == y ? y_stride : weight->out_features;
  const bool is_int8 = weight->scheme == ST_INT8;
  const int32_t block = is_int8 ? 64 : weight->group % 64 ? 32 : 64;
  const IntLayout layout = int_layout(weight->scheme, weight->out_features, in, weight->group, weight->has_zeros);

  for (int64_t done = 0; done < tokens; done += MOST_TOKENS) {
    const int64_t now = tokens - done < MOST_TOKENS ? tokens - done : MOST_TOKENS;
    const int64_t values = aligned(now * layout.columns * sizeof(Wide));
    uint8_t *memory = scratch.of(values + aligned(now * 4) * 2 + now * layout.columns / block * sizeof(Block));
    Activations a;
    a.tokens = now, a.columns = layout.columns, a.values = memory, a.block = block;
    a.scales = (float *)(memory + values);
    a.starts = (int32_t *)(memory + values + aligned(now * 4));
    a.blocks = (Block *)(memory + values + aligned(now * 4) * 2);

    const int64_t pieces = now * in < 32768 ? 1 : now < 4 * pool_threads() ? now : 4 * pool_threads();
    for_each((int32_t)pieces, [&](int32_t piece) {
      for (int64_t t = now * piece / pieces; t < now * (piece + 1) / pieces; t++)
        is_int8 ? round_token8(a, t, x + (done + t) * x_stride, in)
                : round_token4(a, t, x + (done + t) * x_stride, in, weight->group);
    });

    const IntProduct product = {*weight, layout, a, residual ? residual + done * residual_stride : nullptr, residual_stride,
                                y_stride, y + done * y_stride};
    const int64_t parts = (now + ITEM_TOKENS - 1) / ITEM_TOKENS, items = panel_items(layout, now, parts);
    for_each((int32_t)(items * parts), [&](int32_t index) {
      const int64_t item = index / parts, part = index % parts;
      const int64_t begin = now * part / parts, end = now * (part + 1) / parts;
      int_item(product, layout.panels * item / items, layout.panels * (item + 1) / items, begin, end - begin);
    });
  }
}

}  // namespace ST_ISA
