// y = x W^T for integer weights. Activations are rounded to int8 once and laid out for the tiles; then threads take items
// of some panels and some tokens. A token's sums run over the same chunks and blocks of columns whatever the tile, so
// its result depends on nothing else. Where the processor has AMX, products of more tokens use it (linear_amx.inl).
#include "linear_int_activations.inl"

#include <utility>

namespace ST_ISA {

constexpr int64_t MOST_TOKENS = 512;    // rounded at a time, which bounds the scratch memory
constexpr int64_t ITEM_TOKENS = 128, ITEM_PANELS = 8;  // of an item: their chunk of activations stays in L2
constexpr int64_t AMX_ITEM_TOKENS = 256, AMX_ITEM_PANELS = 16;  // on AMX, which needs more work for each byte of weights
constexpr int64_t DIRECT4 = 12;         // up to here, tiles split nibbles themselves; beyond, the first does for all
constexpr int64_t STREAMED_BYTES = 2 << 20;
constexpr int64_t AHEAD = 2;            // chunks that weights in groups are fetched before they are needed
constexpr int64_t ABREAST_TOKENS = 3;   // from here on, several panels share the loads of activations
constexpr int64_t ORDERED_TOKENS = 32;  // up to here, weights are read near the order of memory

// One call, for all of its items.
struct IntProduct {
  const StLinear &weight;
  IntLayout layout;
  Activations x;
  const float *residual;
  int64_t residual_step, y_step;
  float *y;
  bool streams;   // results go past the caches, which they would not fit
  int64_t gated;  // panels of gates, which half of all are, or 0: then panels count gate, up, gate, up
  int32_t activation;  // of gates

  // Where the i-th panel is.
  int64_t place_of(int64_t i) const { return gated ? i / 2 + i % 2 * gated : i; }
  int64_t chunks() const { return (layout.columns + CHUNK - 1) / CHUNK; }
  const uint8_t *panel(int64_t p) const { return weight.blob + p * layout.panel_bytes; }
  const uint8_t *values(int64_t p, int64_t chunk) const {
    if (layout.block_bytes) return panel(p) + chunk * (CHUNK / STEPPED) * layout.block_bytes + layout.values_at;
    return panel(p) + layout.values_at + chunk * CHUNK * PANEL / (weight.scheme == ST_INT4 ? 2 : 1);
  }
};

typedef void (*Tile8)(const Wide *, int64_t, const uint8_t *, int64_t, int32_t *, Apart, uint8_t *, const uint8_t *);
typedef void (*Tile4)(const int8_t *, int64_t, const Block *, int64_t, const Blocks &, float *, const uint8_t *);
typedef void (*Tile8Groups)(const Wide *, int64_t, const Block *, int64_t, const Blocks &, float *, const uint8_t *);

// The tiles of R = 1, 2, ... tokens.
template <class Source, int V, int... R> inline Tile8 tile8_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile8 TILES[] = {tile8<R + 1, V, Source>...};
  return TILES[rows - 1];
}
template <Nibbles FROM, int EXTRAS, int... R> inline Tile4 tile4_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile4 TILES[] = {tile4<R + 1, FROM, EXTRAS>...};
  return TILES[rows - 1];
}
template <int EXTRAS, int... R> inline Tile8Groups tile8_groups_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile8Groups TILES[] = {tile8_groups<R + 1, EXTRAS>...};
  return TILES[rows - 1];
}
#if LANES == 16
template <int EXTRAS, int... R> inline Tile4 tile_folded_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile4 TILES[] = {tile_folded<R + 1, EXTRAS>...};
  return TILES[rows - 1];
}
#endif

// body(first, rows): `tokens` in the fewest tiles, of equal size or one apart.
template <class F> inline void in_tiles(int64_t tokens, int most, F &&body) {
  const int64_t tiles = (tokens + most - 1) / most;
  for (int64_t i = 0, first = 0; i < tiles; i++) {
    const int64_t rows = tokens / tiles + (i < tokens % tiles);
    body(first, (int)rows);
    first += rows;
  }
}

// Tokens [begin, begin + tokens) times PANELS panels from p on over one chunk of columns. sums: of each panel [tokens][SUMS8].
// wide: room for the chunk.
template <int PANELS>
inline void chunk8(const IntProduct &c, int64_t p, int64_t chunk, int64_t begin, int64_t tokens, uint8_t *wide, int32_t *sums,
                   const uint8_t *next) {
  constexpr int V = PANELS * VECTORS8 / PARTS, MOST = PANELS > 2 ? MAX_ROWS_ABREAST : MAX_ROWS;
  constexpr auto ROWS = std::make_integer_sequence<int, MOST>();
  const Apart apart = {c.layout.panel_bytes, tokens * SUMS8};
  const int64_t width = c.x.width(chunk);
  const uint8_t *w = c.values(p, chunk);
  const Wide *x = (const Wide *)c.x.values + c.x.at(chunk, begin);
  if (PANELS == 1 && tokens <= 2)
    return tile8_of<Bytes, VECTORS8>((int)tokens, std::make_integer_sequence<int, 2>())(x, width, w, width / 4, sums, apart,
                                                                                        wide, next);
  const bool widens = LANES != 16 && tokens > MOST;
  in_tiles(tokens, MOST, [&](int64_t first, int rows) {
    const bool is_wide = widens && first > 0;
    const Tile8 tile = is_wide  ? tile8_of<Words, V>(rows, ROWS)
                       : widens ? tile8_of<Widening, V>(rows, ROWS)
                                : tile8_of<Bytes, V>(rows, ROWS);
    for (int part = 0; part < PARTS; part++)
      tile(x + first * width, width, is_wide ? wide + 64 * part : w + 32 * part, width / 4,
           sums + first * SUMS8 + part * V * LANES, apart, wide + 64 * part, next);
  });
}

template <Nibbles FROM, int MOST> inline Tile4 tile4_for(int32_t extras, int rows) {
  constexpr auto ROWS = std::make_integer_sequence<int, MOST>();
  if (FROM == SPLIT && extras & ST_STEPS && extras != FOUR_BITS)
    return extras & ST_FIVE ? tile4_of<SPLIT, FIVE_BITS>(rows, ROWS) : tile4_of<SPLIT, SIX_BITS>(rows, ROWS);
  return extras & ST_STEPS   ? tile4_of<FROM, FOUR_BITS>(rows, ROWS)
         : extras & ST_MINIMA ? tile4_of<FROM, ST_MINIMA>(rows, ROWS)
         : extras & ST_ZEROS ? tile4_of<FROM, ST_ZEROS>(rows, ROWS)
                             : tile4_of<FROM, 0>(rows, ROWS);
}

inline Tile8Groups tile8_groups_for(int32_t extras, int rows) {
  constexpr auto ROWS = std::make_integer_sequence<int, MAX_GROUP_ROWS>();
  return extras & ST_MINIMA ? tile8_groups_of<ST_MINIMA>(rows, ROWS) : tile8_groups_of<0>(rows, ROWS);
}

// Where a panel's blocks of one chunk are.
inline Blocks blocks_of(const IntProduct &c, int64_t p, int64_t chunk, uint8_t *split) {
  const int64_t block = c.x.block;
  Blocks blocks;
  blocks.values = c.values(p, chunk), blocks.panel = c.panel(p), blocks.scales = c.panel(p) + c.layout.scales_at;
  blocks.zeros = c.panel(p) + c.layout.zeros_at, blocks.minima = c.panel(p) + c.layout.minima_at;
  blocks.split = split, blocks.first = (int32_t)(chunk * CHUNK / block);
  blocks.count = (int32_t)(c.x.width(chunk) / block);
  blocks.a_group = (int32_t)(c.weight.group / block), blocks.quads = (int32_t)(block / 4);
  blocks.ahead = (int32_t)(c.layout.panel_bytes / (c.layout.columns / block));
  return blocks;
}

// The same as chunk8 for weights in groups; sums: [tokens][PANEL].
inline void chunk_groups(const IntProduct &c, int64_t p, int64_t chunk, int64_t begin, int64_t tokens, uint8_t *split,
                         float *sums, const uint8_t *next) {
  const int64_t width = c.x.width(chunk);
  const int32_t extras = c.weight.extras;
  Blocks blocks = blocks_of(c, p, chunk, split);
  const Block *about = c.x.blocks + c.x.at(chunk, begin) / c.x.block;
  const auto run = [&](auto tile, auto *x, int64_t first) {
    x += c.x.at(chunk, begin) + first * width;
    tile(x, width, about + first * blocks.count, blocks.count, blocks, sums + first * PANEL, next);
  };
  const auto run8 = [&](int64_t first, int rows) {
    run(tile8_groups_for(extras, rows), (const Wide *)c.x.values, first);
  };
  const auto run4 = [&](Tile4 tile, int64_t first) { run(tile, (const int8_t *)c.x.values, first); };
  const auto run_split = [&](int64_t done) {
    blocks.values = split;
    in_tiles(tokens - done, MAX_ROWS, [&](int64_t first, int rows) { run4(tile4_for<SPLIT, MAX_ROWS>(extras, rows), first + done); });
  };
  if (c.weight.scheme == ST_INT8 && extras & ST_STEPS) {
#if LANES == 16
    if (tokens <= MAX_ROWS) {
      constexpr auto ROWS = std::make_integer_sequence<int, MAX_ROWS>();
      return run4(extras & ST_FIVE ? tile_folded_of<FIVE_BITS>((int)tokens, ROWS)
                                   : tile_folded_of<SIX_BITS>((int)tokens, ROWS), 0);
    }
#endif
    (extras & ST_FIVE ? unfold<5> : unfold<6>)(blocks, width, next, split);
    return run_split(0);
  }
  if (c.weight.scheme == ST_INT8) return in_tiles(tokens, MAX_GROUP_ROWS, run8);
  if (tokens <= DIRECT4)
    return in_tiles(tokens, MAX_PAIRS,
                    [&](int64_t first, int rows) { run4(tile4_for<PAIRS, MAX_PAIRS>(extras, rows), first); });
  run4(tile4_for<SPLITTING, MAX_PAIRS>(extras, MAX_PAIRS), 0);
  run_split(MAX_PAIRS);
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
      c.streams ? stream(to, v) : store(to, v);
    else
      memcpy(to, &v, count * sizeof(float));
  }
}

// Panels of a tile.
inline int64_t panels_abreast(const StLinear &weight, int64_t tokens) {
  return is_by_row(weight.scheme, weight.group) && tokens >= ABREAST_TOKENS ? MOST_PANELS : 1;
}

// Panels [first, last) for tokens [begin, begin + tokens).
inline void int_item(const IntProduct &c, int64_t first, int64_t last, int64_t begin, int64_t tokens) {
  static thread_local Room<uint8_t> scratch;
  const bool by_row = is_by_row(c.weight.scheme, c.weight.group);
  const int64_t panel_sums = tokens * (by_row ? SUMS8 : PANEL);  // of 4 bytes each, integers or floats
  // Few tokens: tile by tile, near the order of memory. Many: chunk by chunk, so that activations stay in the cache.
  const int64_t abreast = panels_abreast(c.weight, tokens);
  const int64_t at_most = tokens <= ORDERED_TOKENS ? abreast : last - first;
  uint8_t *prepared = scratch.of(CHUNK * PANEL * 2 + at_most * panel_sums * 4);
  uint8_t *sums = prepared + CHUNK * PANEL * 2;
  for (int64_t together; first < last; first += together) {
    together = at_most < last - first ? at_most : last - first;
    memset(sums, 0, together * panel_sums * 4);
    for (int64_t chunk = 0; chunk < c.chunks(); chunk++)
      for (int64_t i = 0, panels; i < together; i += panels) {
        panels = abreast <= together - i ? abreast : 1;
        // what comes next, fetched meanwhile (past the end of the item it does no harm)
        const uint8_t *next = i + panels < together ? c.values(first + i + panels, chunk)
                              : !by_row && together == 1 ? c.panel(first) + c.layout.panel_bytes * (chunk + AHEAD) / c.chunks()
                              : chunk + 1 < c.chunks() ? c.values(first, chunk + 1) : c.panel(first + together);
        if (by_row)
          (panels > 1 ? chunk8<MOST_PANELS> : chunk8<1>)(c, first + i, chunk, begin, tokens, prepared,
                                                        (int32_t *)sums + i * panel_sums, next);
        else
          chunk_groups(c, first + i, chunk, begin, tokens, prepared, (float *)sums + i * panel_sums, next);
      }
    for (int64_t i = 0; i < together; i++)
      for (int64_t t = 0; t < tokens; t++) {
        const float *scales = (const float *)c.panel(first + i);
        if (by_row)
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

#ifdef ST_AMX
void amx_item(const IntProduct &c, int64_t first, int64_t last, int64_t begin, int64_t tokens);
// From so many tokens on AMX is faster than vectors (measured, see docs/log.md): with int8 where vectors no longer keep up with
// memory; with groups later, since the sums of each group have to leave the tiles.
constexpr int64_t AMX_FROM = 4, AMX_GROUPS_FROM = 9;
inline bool goes_by_amx(const StLinear &weight, int64_t tokens) {
  if (weight.scheme == ST_BFLOAT16) return true;
  return tokens >= (is_by_row(weight.scheme, weight.group) ? AMX_FROM : AMX_GROUPS_FROM);
}
#else
inline bool goes_by_amx(const StLinear &, int64_t) { return false; }
inline void amx_item(const IntProduct &, int64_t, int64_t, int64_t, int64_t) {}
#endif

// Panels that an item has a multiple of: two for AMX, and as many as a tile has if threads even out all the same.
inline int64_t item_unit(const StLinear &weight, int64_t panels, int64_t tokens, bool by_amx) {
  const int64_t abreast = by_amx ? 1 : panels_abreast(weight, tokens);
  return abreast > 2 && panels >= 4 * abreast * pool_threads() ? abreast : 2;
}

// How many items to cut panels into: enough for the threads to even out, none too small to be worth a hand-over.
inline int64_t panel_items(const IntLayout &layout, int64_t tokens, int64_t token_parts, int64_t most, int64_t unit) {
  const int64_t work = layout.panel_bytes * (tokens < 8 ? 8 : tokens) / 8;  // in bytes read at batch 1, about
  const int64_t least = (32768 + work - 1) / work;                          // panels of an item
  const int64_t wanted = 16 * pool_threads() / token_parts + 1;
  int64_t each = layout.panels / wanted;
  each = each < least ? least : each;
  each = tokens > ORDERED_TOKENS && each > most ? most : each;
  each = each < 1 ? 1 : each;
  each = (each + unit - 1) / unit;
  return ((layout.panels + unit - 1) / unit + each - 1) / each;
}

// Columns whose products are added up as integers.
inline int32_t block_columns(int32_t group) {
  for (int32_t block = LANES == 16 ? 128 : 64; block > 16; block /= 2)
    if (group % block == 0) return block;
  return 16;
}

// The scratch memory of `now` tokens' activations.
inline Activations activations_for(const StLinear &weight, const IntLayout &layout, int64_t now, bool is_tiled) {
  static thread_local Room<uint8_t> scratch;
  Activations a;
  a.tokens = now, a.columns = layout.columns, a.block = block_columns(weight.group), a.is_tiled = is_tiled;
  const int64_t values = aligned(a.bytes()), numbers = aligned(now * 4);
  a.values = scratch.of(values + numbers * 2 + a.bytes() / a.block * sizeof(Block));
  a.scales = (float *)(a.values + values);
  a.starts = (int32_t *)(a.values + values + numbers);
  a.blocks = (Block *)(a.values + values + numbers * 2);
  if (is_tiled && is_grouped(weight))  // what fills up a tile is computed too, and slowly if it is subnormal
    for (int64_t at = 0; at < layout.columns; at += CHUNK) {
      Block *first = a.blocks + a.at(at / CHUNK, now) / a.block;
      memset(first, 0, (a.padded_tokens() - now) * a.padded_width(at / CHUNK) / a.block * sizeof(Block));
    }
  return a;
}

// x: one token's, in the order of the weight's columns when it has one.
inline void round_token(const StLinear &weight, const Activations &a, int64_t token, const float *x) {
  static thread_local Room<float> room;
  const int64_t in = weight.in_features;
  const bool turns = weight.scheme != ST_BFLOAT16 && weight.extras & ST_TURNED;
  float *to = weight.columns || turns ? room.of(in) : nullptr;
  if (weight.columns) {
    for (int64_t k = 0; k < in; k++) to[k] = x[weight.columns[k]];
    x = to;
  }
  if (turns) turn(x, in, to), x = to;
  if (weight.scheme == ST_BFLOAT16)
    round_bfloat16(a, token, x, in);
  else if (is_by_row(weight.scheme, weight.group))
    round_token8(a, token, x, in);
  else if (bits_of(weight.scheme, weight.extras) == 8)
    round_groups<true>(a, token, x, in, weight.group, 128);
  else
    round_groups<false>(a, token, x, in, weight.group, 1 << (bits_of(weight.scheme, weight.extras) - 1));
}

// Where a weight's panels and columns are. Columns of bfloat16 count twice: they are bytes of a token.
inline IntLayout layout_of(const StLinear &weight) {
  if (weight.scheme != ST_BFLOAT16)
    return int_layout(weight.scheme, weight.out_features, weight.in_features, weight.group, weight.extras);
  IntLayout layout = {};
  layout.panels = (weight.out_features + PANEL - 1) / PANEL;
  layout.columns = (weight.in_features + 1) / 2 * 4, layout.groups = 1;
  layout.panel_bytes = layout.columns * PANEL;
  return layout;
}

// Whether results are better written around the caches: more than they hold, in whole lines.
inline bool is_streamed(const StLinear &weight, int64_t tokens, const float *y, int64_t y_stride) {
  const int64_t bytes = tokens * weight.out_features * (int64_t)sizeof(float);
  return CAN_STREAM && bytes > STREAMED_BYTES && (uintptr_t)y % 64 == 0 && y_stride % 16 == 0;
}

// A call's results; gated, activation: see IntProduct.
struct Results {
  const float *residual;
  int64_t residual_stride;
  float *y;
  int64_t y_stride, gated;
  int32_t activation;
};

inline void multiply(const StLinear &weight, int32_t tokens, const float *x, int64_t x_stride, const Results &to) {
  const int64_t in = weight.in_features;
  const IntLayout layout = layout_of(weight);
  const bool by_amx = goes_by_amx(weight, tokens);
  for (int64_t done = 0; done < tokens; done += MOST_TOKENS) {
    const int64_t now = tokens - done < MOST_TOKENS ? tokens - done : MOST_TOKENS;
    const Activations a = activations_for(weight, layout, now, by_amx);
    const int64_t pieces = now * in < 32768 ? 1 : now < 4 * pool_threads() ? now : 4 * pool_threads();
    for_each((int32_t)pieces, [&](int32_t piece) {
      for (int64_t t = now * piece / pieces; t < now * (piece + 1) / pieces; t++)
        round_token(weight, a, t, x + (done + t) * x_stride);
    });

    const float *residual = to.residual ? to.residual + done * to.residual_stride : nullptr;
    const bool streams = is_streamed(weight, now, to.y, to.y_stride);
    const IntProduct product = {weight,     layout,  a,       residual, to.residual_stride, to.y_stride, to.y + done * to.y_stride,
                                streams, to.gated, to.activation};
    const int64_t each = by_amx ? AMX_ITEM_TOKENS : ITEM_TOKENS, unit = by_amx ? TILE_ROWS : 1, units = (now + unit - 1) / unit;
    const int64_t parts = (now + each - 1) / each, together = item_unit(weight, layout.panels, now, by_amx);
    const int64_t of_panels = (layout.panels + together - 1) / together;
    const int64_t items = panel_items(layout, now, parts, by_amx ? AMX_ITEM_PANELS : ITEM_PANELS, together);
    for_each((int32_t)(items * parts), [&](int32_t index) {
      const int64_t item = index / parts, part = index % parts;
      const int64_t begin = units * part / parts * unit, rest = units * (part + 1) / parts * unit, end = rest < now ? rest : now;
      const int64_t first = of_panels * item / items * together, last = of_panels * (item + 1) / items * together;
      (by_amx ? amx_item : int_item)(product, first, last < layout.panels ? last : layout.panels, begin, end - begin);
    });
  }
}

void linear_int(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
                int64_t y_stride, int64_t residual_stride) {
  multiply(*weight, tokens, x, x_stride, {residual, residual_stride, y, y_stride, 0, 0});
}

// y = activation(gates) * ups, the weight's outputs being gates, then ups. False where that takes more than one pass.
bool gated_int(const StLinear *weight, int32_t activation, int32_t tokens, const float *x, int64_t x_stride, float *y) {
  const int64_t inner = weight->out_features / 2;
  if (!goes_by_amx(*weight, tokens) || weight->below || inner % PANEL) return false;
  multiply(*weight, tokens, x, x_stride, {nullptr, 0, y, inner, inner / PANEL, activation});
  return true;
}

}  // namespace ST_ISA

#ifdef ST_AMX
#include "linear_amx.inl"
#endif
