// y = x W^T on AMX: int8 and int4 weights, and bfloat16 ones with rounded activations. The weights lie as for the vector
// kernels: 16 outputs times 64 bytes of a panel are a tile, so either kind of kernel can read them.
//
// Integer products are exact and the code after them is shared, so a token's result has the same bits on AMX as on vectors:
// which is used depends on the number of tokens, by speed alone. bfloat16 products add in another order than the vector
// kernels' do: on this instruction set they use AMX whatever the number of tokens, and each sum runs over all columns in order.
//
// Two panels at a time are multiplied with all tokens of an item, whose activations the second-level cache holds: over all columns,
// so in the order of memory, up to 32 tokens, and over DEEP chunks of them where there are more. What these come to leaves its
// tiles and comes back, which after each chunk would cost a quarter of the rate.
//
// Weights in groups have a scale for every block of columns, so each product of tiles leaves its register at once: 16 tokens
// times 16 outputs stay in vector registers over the blocks of a chunk.
#pragma once
#include "amx_block.inl"
#include "vecmath.inl"

namespace ST_ISA {

constexpr int64_t BLOCK_TOKENS = 2 * TILE_ROWS, DEEP = 4;

// Unpacks pairs of four-bit integers into signed bytes, in the order of an int8 panel. ahead: what is unpacked next.
inline void split_pairs(const uint8_t *pairs, int64_t bytes, const uint8_t *ahead, uint8_t *to) {
  for (int64_t i = 0; i < bytes; i += 64, to += 128) {
    __builtin_prefetch(ahead + i, 0, 3);
    const U8 both = load<U8>(pairs + i);
    store(to, (both & 15) - 8), store(to + 64, (both >> 4) - 8);
  }
}

// 16 tokens times a panel over the blocks of a chunk. sums: [16][PANEL]; about: of the first token, those of the next
// about_step further.
struct AmxGroups {
  const int8_t *x;
  const uint8_t *w;
  const Block *about;
  int64_t about_step, block;  // columns of a block
  const Blocks &of_panel;
  float *sums;
};

// sums += scales * products of the first ROWS tokens; the other tokens' are left as they are. IS_SIGNED: the weights are what
// split_pairs makes of them, and not bytes with the zero point 128.
template <int ROWS, int EXTRAS, bool IS_SIGNED> void amx_groups(const AmxGroups &c) {
  alignas(64) int32_t dots[4][TILE_ROWS][PANEL];  // one is read while others are still on their way
  F32 sums[ROWS];
  ST_UNROLL for (int r = 0; r < ROWS; r++) sums[r] = load<F32>(c.sums + r * PANEL);
  const int64_t depth = depth_of(c.block);
  const int8_t *x = c.x;
  const uint8_t *w = c.w;
  const Block *about = c.about;
  int64_t group = c.of_panel.first / c.of_panel.a_group;
  int32_t left = c.of_panel.a_group - c.of_panel.first % c.of_panel.a_group;  // blocks of this group
  for (int32_t b = 0; b < c.of_panel.count; b++, about++) {
    int32_t(*here)[PANEL] = dots[b % 4];
    tile_zero<4>();
    for (int64_t k = 0; k < c.block; k += depth, x += TILE_ROWS * depth, w += PANEL * depth) {
      tile_load<0>(x, depth), tile_load<2>(w, 64);
      if constexpr (IS_SIGNED)
        tile_product_signed<4, 0, 2>();
      else
        tile_product_bytes<4, 0, 2>();
    }
    tile_store<4>(here, 64);
    if (left == 0) group++, left = c.of_panel.a_group;
    left--;
    const Group<EXTRAS> of_group(c.of_panel, group, 0);
    ST_UNROLL for (int r = 0; r < ROWS; r++) {
      const Block &its = about[r * c.about_step];
      const I32 dot = load<I32>(here[r]);
      sums[r] = of_group.added(sums[r], to_f32(IS_SIGNED ? dot : dot + its.start), its);
    }
  }
  ST_UNROLL for (int r = 0; r < ROWS; r++) store(c.sums + r * PANEL, sums[r]);
}

typedef void (*AmxGroupsKernel)(const AmxGroups &);

template <int EXTRAS, bool IS_SIGNED> inline AmxGroupsKernel amx_groups_for_rows(int64_t rows) {
  return rows > 8 ? amx_groups<16, EXTRAS, IS_SIGNED> : amx_groups<8, EXTRAS, IS_SIGNED>;
}
inline AmxGroupsKernel amx_groups_of(const StLinear &weight, int64_t rows) {
  if (weight.scheme == ST_INT8 && weight.extras & ST_STEPS)
    return weight.extras & ST_FIVE ? amx_groups_for_rows<FIVE_BITS, false>(rows) : amx_groups_for_rows<SIX_BITS, false>(rows);
  if (weight.extras & ST_STEPS) return amx_groups_for_rows<FOUR_BITS, true>(rows);
  if (weight.scheme == ST_INT8)
    return weight.extras & ST_MINIMA ? amx_groups_for_rows<ST_MINIMA, false>(rows) : amx_groups_for_rows<0, false>(rows);
  if (weight.extras & ST_MINIMA) return amx_groups_for_rows<ST_MINIMA, true>(rows);
  if (weight.extras & ST_ZEROS) return amx_groups_for_rows<ST_ZEROS, true>(rows);
  return amx_groups_for_rows<0, true>(rows);
}

// A part of an AmxPart that one call computes: tokens [token, token + tokens) times panels [panel, panel + panels), counted
// from the part's first, over `chunks` chunks; at most BLOCK_TOKENS and 2 panels.
struct PartBlock {
  int64_t chunk, chunks, token, tokens, panel, panels;
};

// Some panels times some tokens: an item of a thread's work, or as much of one as its scratch memory holds.
struct AmxPart {
  const IntProduct &c;
  int64_t panel, panels, token, tokens;
  uint8_t *split;  // of int4: a panel's chunk
  uint8_t *sums;   // [panel][tokens, rounded up][PANEL], of 4 bytes each

  // How many chunks are added up before sums leave their tiles: all of them where one block has all tokens.
  int64_t chunks_at_once(int64_t most) const { return tokens <= BLOCK_TOKENS || c.chunks() < most ? c.chunks() : most; }
  // Bytes from a block's first panel to its second.
  int64_t second_panel() const { return (c.place_of(1) - c.place_of(0)) * c.layout.panel_bytes; }
  int64_t panel_sums() const { return (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS * PANEL * 4; }
  uint8_t *sums_at(int64_t p, int64_t t) const { return sums + p * panel_sums() + t * PANEL * 4; }

  void run() const {
    if (is_grouped(c.weight)) return run_groups();
    const int64_t deep = chunks_at_once(DEEP);
    for (int64_t chunk = 0; chunk < c.chunks(); chunk += deep) {
      const int64_t chunks = c.chunks() - chunk < deep ? c.chunks() - chunk : deep;
      for (int64_t p = 0; p < panels; p += 2)
        for (int64_t t = 0; t < tokens; t += BLOCK_TOKENS) {
          const int64_t count = tokens - t < BLOCK_TOKENS ? tokens - t : BLOCK_TOKENS, pair = panels - p < 2 ? 1 : 2;
          const PartBlock block = {chunk, chunks, t, count, p, pair};
          c.weight.scheme == ST_BFLOAT16 ? add<true>(block) : add<false>(block);
          if (chunk + chunks == c.chunks()) finish_block(p, pair, t, count);
        }
    }
  }

  template <bool IS_FLOAT> void add(const PartBlock &at) const {
    const AmxBlock products =
        (tokens > BLOCK_TOKENS ? amx_block_of<IS_FLOAT, true> : amx_block_of<IS_FLOAT, false>)(at.tokens, at.panels);
    AmxCall call = call_of(at);
    const int64_t last = at.chunk + at.chunks - 1, whole = c.x.width(last) == CHUNK ? at.chunks : at.chunks - 1;
    if (whole) {
      call.steps = CHUNK / 64, call.pieces = whole, call.next_piece = CHUNK * c.x.padded_tokens();
      products(call);
      call.is_first = false, call.w += whole * CHUNK * PANEL, call.ahead += whole * call.steps * call.ahead_lines * 64;
    }
    if (whole == at.chunks) return;
    const int64_t width = c.x.width(last), short_step = width % 64;
    call.x = c.x.values + c.x.at(last, token + at.token), call.second_x = TILE_ROWS * c.x.padded_width(last);
    call.steps = width / 64, call.pieces = 1;
    if (call.steps) products(call), call.is_first = false;
    if (!short_step) return;
    tiles_begin(short_step);  // of bfloat16 alone
    call.x += call.steps * call.x_step, call.w += call.steps * 1024, call.steps = 1, call.ahead_lines = 0;
    products(call);
    tiles_begin(64);
  }

  AmxCall call_of(const PartBlock &at) const {
    AmxCall call{};
    call.x_stride = 64, call.x_step = TILE_ROWS * 64, call.second_x = TILE_ROWS * CHUNK;
    call.x = c.x.values + c.x.at(at.chunk, token + at.token);
    call.w = c.values(c.place_of(panel + at.panel), at.chunk);
    call.second_w = second_panel();
    call.w_stride = 64, call.sum_stride = 64, call.second_sums = panel_sums();
    call.sums = sums_at(at.panel, at.token);
    call.is_first = at.chunk == 0;
    fetch(call, at);
    return call;
  }

  // Prefetch weights into the second-level cache: those a chunk further in memory; or, where several blocks of tokens take the
  // same, the next that all of them will take, each its share.
  void fetch(AmxCall &call, const PartBlock &at) const {
    const int64_t shares = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    call.second_ahead = second_panel(), call.ahead_lines = (PANEL + shares - 1) / shares;
    if (shares == 1) {
      call.ahead = call.w + CHUNK * PANEL;
      return;
    }
    const bool is_last = at.panel + at.panels == panels, is_end = is_last && at.chunk + at.chunks == c.chunks();
    const int64_t following = is_last && !is_end ? panel : panel + at.panel + at.panels;
    const int64_t chunk = is_end ? 0 : is_last ? at.chunk + at.chunks : at.chunk;
    call.ahead = c.values(c.place_of(following), chunk) + at.token / BLOCK_TOKENS * at.chunks * CHUNK / 64 * call.ahead_lines * 64;
  }

  // Panel by panel, each unpacked once for all tokens.
  void run_groups() const {
    memset(sums, 0, panels * panel_sums());
    const int64_t deep = chunks_at_once(1);
    for (int64_t first = 0; first < c.chunks(); first += deep)
      for (int64_t p = 0; p < panels; p++)
        for (int64_t chunk = first; chunk < first + deep; chunk++) {
          const bool is_last = chunk + 1 == first + deep, is_end = is_last && p + 1 == panels;
          const int64_t next_panel = panel + (is_end && chunk + 1 < c.chunks() ? 0 : p + is_last);
          const int64_t next_chunk = !is_last ? chunk + 1 : !is_end ? first : chunk + 1 < c.chunks() ? chunk + 1 : 0;
          add_groups(p, chunk, c.values(c.place_of(next_panel), next_chunk));
        }
    for (int64_t p = 0; p < panels; p += 2) finish_block(p, panels - p < 2 ? 1 : 2, 0, tokens);
  }

  void add_groups(int64_t p, int64_t chunk, const uint8_t *ahead) const {
    const int64_t width = c.x.width(chunk);
    const Blocks of_panel = blocks_of(c, c.place_of(panel + p), chunk, nullptr);
    const bool is_split = c.weight.scheme == ST_INT4;
    const bool is_folded = c.layout.block_bytes && !is_split;
    if (is_folded) (c.weight.extras & ST_FIVE ? unfold<5> : unfold<6>)(of_panel, width, ahead, split);
    const int64_t at_once = c.layout.block_bytes ? STEPPED : width, pairs = at_once * PANEL / 2;
    for (int64_t k = 0, i = 0; is_split && k < width; k += at_once, i++)
      split_pairs(of_panel.values + i * (pairs + c.layout.values_at), pairs, ahead + i * pairs, split + k * PANEL);
    for (int64_t t = 0; t < tokens; t += TILE_ROWS) {
      const int64_t at = c.x.at(chunk, token + t);
      float *to = (float *)sums_at(p, t);
      amx_groups_of(c.weight, tokens - t)({(const int8_t *)c.x.values + at, is_split || is_folded ? split : of_panel.values,
                                           c.x.blocks + at / c.x.block, c.x.padded_width(chunk) / c.x.block, c.x.block, of_panel, to});
    }
  }

  void finish_block(int64_t p, int64_t count, int64_t first, int64_t num_tokens) const {
    for (int64_t t = first; t < first + num_tokens; t++)
      if (c.gated)
        finish_gated(p, t);
      else
        for (int64_t i = p; i < p + count; i++) finish(c, panel + i, token + t, [&](int) { return result(i, t); });
  }

  // y = activation(gates) * ups for one token: p is a panel of gates, p + 1 the panel of ups that belongs to it.
  void finish_gated(int64_t p, int64_t t) const {
    F32 halves[2] = {result(p, t), result(p + 1, t)};
    if (c.weight.bias)
      for (int i = 0; i < 2; i++) halves[i] += load<F32>(c.weight.bias + c.place_of(panel + p + i) * PANEL);
    const F32 v = gated_by(c.activation, halves[0], halves[1]);
    float *to = c.y + (token + t) * c.y_step + (panel + p) / 2 * PANEL;
    c.streams ? stream(to, v) : store(to, v);
  }

  F32 result(int64_t p, int64_t t) const {
    const uint8_t *at = sums_at(p, t);
    if (!is_by_row(c.weight.scheme, c.weight.group)) return load<F32>(at);
    const F32 scales = load<F32>(c.panel(c.place_of(panel + p)));
    return to_f32(load<I32>(at) + c.x.starts[token + t]) * scales * c.x.scales[token + t];
  }
};

// y for panels [first, last) and tokens [begin, begin + tokens).
void amx_item(const IntProduct &c, int64_t first, int64_t last, int64_t begin, int64_t tokens) {
  static thread_local Room<uint8_t> scratch;
  const int64_t together = last - first < AMX_ITEM_PANELS ? last - first : AMX_ITEM_PANELS;
  AmxPart part = {c, first, together, begin, tokens, nullptr, nullptr};
  part.split = scratch.of(CHUNK * PANEL + together * part.panel_sums());
  part.sums = part.split + CHUNK * PANEL;
  tiles_begin(c.x.depth());
  for (; part.panel < last; part.panel += together) {
    part.panels = last - part.panel < together ? last - part.panel : together;
    part.run();
  }
  tiles_end();
}

}  // namespace ST_ISA
