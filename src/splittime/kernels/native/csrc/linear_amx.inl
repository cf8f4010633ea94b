// y = x W^T on AMX: int8 and int4 weights, and bfloat16 ones with rounded activations. The weights lie as for the vector
// kernels: 16 outputs times 64 bytes of a panel are a tile, so either kind of kernel can read them.
//
// Integer products are exact and the code after them is shared, so a token's result has the same bits on AMX as on vectors:
// which is used depends on the number of tokens, by speed alone. bfloat16 products add in another order than the vector
// kernels' do: on this instruction set they use AMX whatever the number of tokens.
//
// With many tokens, a chunk of the columns of 32 tokens (16 KB) stays in the first-level cache while the weights of an item's
// panels come from the second, 32 outputs at a time. Measured on a Sapphire Rapids class Xeon, one core, int8: 3.5 to 4 TOP/s
// of at most 6.4; 5.3 where all loads hit the first level. Prefetching into the first level costs more than it saves.
#pragma once
#include "amx_block.inl"
#include "vecmath.inl"

namespace ST_ISA {

constexpr int64_t TILE_TOKENS = AMX_ROWS, BLOCK_TOKENS = 2 * TILE_TOKENS;

// Unpacks pairs of four-bit integers into bytes, in the order of an int8 panel.
inline void split_pairs(const uint8_t *pairs, int64_t bytes, uint8_t *to) {
  for (int64_t i = 0; i < bytes; i += 64, to += 128) {
    const U8 both = load<U8>(pairs + i);
    store(to, both & 15), store(to + 64, both >> 4);
  }
}

// A part of an AmxPart that one call computes: tokens [token, token + tokens) times panels [panel, panel + panels) of one chunk,
// counted from the part's first; at most BLOCK_TOKENS and 2.
struct PartBlock {
  int64_t chunk, token, tokens, panel, panels;
};

// Some panels times some tokens: an item of a thread's work, or as much of one as its scratch memory holds.
struct AmxPart {
  const IntProduct &c;
  int64_t panel, panels, token, tokens;
  uint8_t *split;  // [panel][CHUNK * PANEL], of int4
  uint8_t *sums;   // [panel][tokens, rounded up][PANEL], of 4 bytes each

  // Each weight is used once, so they are read in the order of memory.
  bool is_ordered() const { return tokens <= TILE_TOKENS; }
  // Bytes from a block's first panel to its second.
  int64_t second_panel() const { return (c.place_of(1) - c.place_of(0)) * c.layout.panel_bytes; }
  int64_t panel_sums() const { return (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS * PANEL * 4; }

  void run() const {
    const bool by_row = is_by_row(c.weight.scheme, c.weight.group) || c.weight.scheme == ST_BFLOAT16;
    if (!by_row) memset(sums, 0, panels * panel_sums());
    if (is_ordered()) {
      for (int64_t p = 0; p < panels; p += 2)
        for (int64_t chunk = 0; chunk < c.chunks(); chunk++) add({chunk, 0, tokens, p, panels - p < 2 ? 1 : 2});
      return finish_tokens(0, tokens);
    }
    for (int64_t chunk = 0; chunk < c.chunks(); chunk++)
      for (int64_t t = 0; t < tokens; t += BLOCK_TOKENS) {
        const int64_t count = tokens - t < BLOCK_TOKENS ? tokens - t : BLOCK_TOKENS;
        for (int64_t p = 0; p < panels; p += 2) add({chunk, t, count, p, panels - p < 2 ? 1 : 2});
        if (chunk + 1 == c.chunks()) finish_tokens(t, count);  // while their sums are in the cache
      }
  }

  void add(const PartBlock &block) const {
    if (c.weight.scheme == ST_BFLOAT16) return add_chunk<true>(block);
    if (is_by_row(c.weight.scheme, c.weight.group)) return add_chunk<false>(block);
    if (c.weight.extras & ST_MINIMA) return add_groups<ST_MINIMA>(block);
    if (c.weight.extras & ST_ZEROS) return add_groups<ST_ZEROS>(block);
    add_groups<0>(block);
  }

  AmxCall call_of(const PartBlock &at) const {
    AmxCall call{};
    call.x_stride = c.x.width(at.chunk);
    call.x = c.x.values + c.x.at(at.chunk, token + at.token);
    const bool is_split = c.weight.scheme == ST_INT4;
    call.w = is_split ? split + at.panel * CHUNK * PANEL : c.values(c.place_of(panel + at.panel), at.chunk);
    call.second_w = is_split ? CHUNK * PANEL : second_panel();
    call.w_stride = 64, call.sum_stride = 64, call.second_sums = panel_sums();
    call.sums = sums + at.panel * panel_sums() + at.token * PANEL * 4;
    call.is_first = at.chunk == 0;
    fetch(call, at);
    return call;
  }

  // Prefetch the weights of the next chunk, or panels, into the second-level cache: each block of tokens a share of them.
  void fetch(AmxCall &call, const PartBlock &at) const {
    const int64_t shares = panel_sums() / (BLOCK_TOKENS * PANEL * 4), bytes = c.values(0, 1) - c.values(0, 0);
    const int64_t lines = (bytes / 64 + shares - 1) / shares, following = panel + at.panel + (is_ordered() ? 2 : panels);
    const bool is_last = at.chunk + 1 == c.chunks();
    const uint8_t *next = c.values(c.place_of(is_last ? following : panel + at.panel), is_last ? 0 : at.chunk + 1);
    call.ahead = next + at.token / BLOCK_TOKENS * lines * 64, call.second_ahead = second_panel();
    call.ahead_lines = (lines + CHUNK / 64 - 1) / (CHUNK / 64);
  }

  // For weights whose sums run over whole rows: int8 without groups, and bfloat16, whose last step may be short.
  template <bool IS_FLOAT> void add_chunk(const PartBlock &at) const {
    const int64_t width = c.x.width(at.chunk), short_step = width % 64;
    const AmxBlock products = amx_block_of<IS_FLOAT>(at.tokens, at.panels);
    AmxCall call = call_of(at);
    call.steps = width / 64;
    products(call);
    if (!short_step) return;
    tiles_begin(short_step);
    call.x += call.steps * 64, call.w += call.steps * 1024, call.steps = 1, call.is_first = false, call.ahead_lines = 0;
    products(call);
    tiles_begin(64);
  }

  // For weights in groups: sums run over the blocks of a chunk, each of which has scales of its own.
  template <int EXTRAS> void add_groups(const PartBlock &at) const {
    const int64_t block = c.x.block, depth = block < 64 ? block : 64, blocks = c.x.width(at.chunk) / block;
    alignas(64) int32_t dots[2][BLOCK_TOKENS][PANEL];
    if (c.weight.scheme == ST_INT4 && at.token == 0)
      for (int64_t i = at.panel; i < at.panel + at.panels; i++)
        split_pairs(c.values(c.place_of(panel + i), at.chunk), blocks * block * PANEL / 2, split + i * CHUNK * PANEL);
    AmxCall call = call_of(at);
    float *to = (float *)call.sums;
    call.sums = dots, call.second_sums = sizeof dots[0], call.is_first = true, call.steps = block / depth;
    const AmxBlock products = amx_block_of<false>(at.tokens, at.panels);
    const Block *about = c.x.blocks + c.x.at(at.chunk, token + at.token) / block;
    for (int64_t b = 0; b < blocks; b++, about++, call.x += block, call.w += block * PANEL) {
      products(call);
      call.ahead += call.steps * call.ahead_lines * 64;
      for (int64_t i = 0; i < at.panels; i++)
        add_dots<EXTRAS>(c.place_of(panel + at.panel + i), (at.chunk * CHUNK + b * block) / c.weight.group, dots[i], at.tokens, about,
                         blocks, to + i * panel_sums() / 4);
    }
  }

  // to += scales * (a block's products), for `count` tokens.
  template <int EXTRAS>
  void add_dots(int64_t p, int64_t group, const int32_t (*dots)[PANEL], int64_t count, const Block *about, int64_t blocks,
                float *to) const {
    Blocks of_panel;
    of_panel.scales = c.panel(p);
    of_panel.zeros = c.panel(p) + c.layout.zeros_at, of_panel.minima = c.panel(p) + c.layout.minima_at;
    const Group<EXTRAS> of_group(of_panel, group, 0);
    for (int64_t r = 0; r < count; r++, about += blocks, to += PANEL)
      of_group.add(to_f32(load<I32>(dots[r]) + about->start), *about, to);
  }

  void finish_tokens(int64_t first, int64_t count) const {
    for (int64_t t = first; t < first + count; t++)
      if (c.gated)
        for (int64_t p = 0; p < panels; p += 2) finish_gated(p, t);
      else
        for (int64_t p = 0; p < panels; p++) finish(c, panel + p, token + t, [&](int) { return result(p, t); });
  }

  // y = silu(gates) * ups for one token: p is a panel of gates, p + 1 the panel of ups that belongs to it.
  void finish_gated(int64_t p, int64_t t) const {
    F32 halves[2] = {result(p, t), result(p + 1, t)};
    if (c.weight.bias)
      for (int i = 0; i < 2; i++) halves[i] += load<F32>(c.weight.bias + c.place_of(panel + p + i) * PANEL);
    const F32 v = silu_mul_of(halves[0], halves[1]);
    float *to = c.y + (token + t) * c.y_step + (panel + p) / 2 * PANEL;
    c.streams ? stream(to, v) : store(to, v);
  }

  F32 result(int64_t p, int64_t t) const {
    const uint8_t *at = sums + p * panel_sums() + t * PANEL * 4;
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
  part.split = scratch.of(together * (CHUNK * PANEL + part.panel_sums()));
  part.sums = part.split + together * CHUNK * PANEL;
  tiles_begin(c.x.depth());
  for (; part.panel < last; part.panel += together) {
    part.panels = last - part.panel < together ? last - part.panel : together;
    part.run();
  }
  tiles_end();
}

}  // namespace ST_ISA
