// y = x W^T for float32 and bfloat16 weights.
//
// A weight lies in panels of 16 outputs, [panel][step][64 bytes]: a step is one k of float32, or two neighbouring k of
// bfloat16. The tiles that walk over them are in linear_float_tiles.inl.
//
// The law "a token's result depends on no other token" holds because every tile shape adds in one order: products one
// after the other within a block of BLOCK columns, then the blocks, then bias, then residual. Tokens are never padded.
//
// Few tokens: the weights are read once, from memory, and the next block is prefetched. Many tokens: the activations of
// one K block stay in L2, a panel's block in L1, and the tiles pass over it.
#include "linear_float_tiles.inl"

namespace ST_ISA {
namespace floats {

constexpr int BLOCK_ROWS = 192;             // tokens whose K block (192 KiB) stays in L2
constexpr int64_t NEAR = 2048;              // bytes to prefetch ahead in one stream; a block of float32 would fill L1
constexpr int64_t SMALL_PRODUCT = 1 << 16;  // multiplications (2 us of them) that are not worth a second thread

inline thread_local Room<float> activations, sums;

// `count` things in `parts` parts that differ by one at most: the first of part i.
inline int64_t begin_of(int64_t count, int64_t parts, int64_t i) { return count * i / parts; }

// One product, cut into blocks of tokens times groups of panels.
template <class W> struct Product {
  const StLinear *weight;
  const float *residual;
  int64_t residual_stride;
  float *y;
  int64_t y_stride;
  const typename W::Word *x;  // [token block][K block][token][WORDS_PER_BLOCK]
  int32_t tokens, token_blocks, k_blocks, panels, group;
  int64_t panel_bytes;

  void run(int32_t item) const;
  void sweep(int32_t row_begin, int32_t row_end, int32_t panel_begin, int32_t panel_end, int32_t following) const;
  void finish(int32_t row_begin, int32_t row_end, int32_t panel, const float *sum) const;
};

template <class W> void Product<W>::run(int32_t item) const {
  const int32_t row_begin = begin_of(tokens, token_blocks, item % token_blocks);
  const int32_t row_end = begin_of(tokens, token_blocks, item % token_blocks + 1);
  const int32_t begin = item / token_blocks * group, end = begin + group < panels ? begin + group : panels;
  // One tile of tokens: panel by panel, so that memory is read in order. More: K block by K block.
  const int32_t span = row_end - row_begin <= MAX_ROWS ? panels_of(row_end - row_begin) : end - begin;
  for (int32_t panel = begin; panel < end; panel += span)
    sweep(row_begin, row_end, panel, panel + span < end ? panel + span : end, panel + span);
}

// All of K, over these tokens and panels; `following`: the panel that comes next, to prefetch.
template <class W>
void Product<W>::sweep(int32_t row_begin, int32_t row_end, int32_t begin, int32_t end, int32_t following) const {
  const int32_t rows = row_end - row_begin, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
  const int32_t each_rows = rows / tiles, larger = rows % tiles;  // the first `larger` tiles have one row more
  const int32_t wide = panels_of(larger ? each_rows + 1 : each_rows);
  const int64_t block_bytes = (int64_t)BLOCK / W::K_PER_STEP * LINE;
  float *sum = sums.of((int64_t)(end - begin) * rows * PANEL);
  TileCall<typename W::Word> call;
  call.panel_bytes = panel_bytes;
  call.panel_sums = (int64_t)rows * PANEL;
  for (int32_t k = 0; k < k_blocks; k++) {
    const int32_t columns = k + 1 < k_blocks ? BLOCK : weight->in_features - k * BLOCK;
    const typename W::Word *x_block =
        x + ((int64_t)row_begin * k_blocks + (int64_t)k * rows) * W::WORDS_PER_BLOCK;
    call.steps = (columns + W::K_PER_STEP - 1) / W::K_PER_STEP;
    call.is_first = k == 0;
    for (int32_t panel = begin, width; panel < end; panel += width) {
      width = panel + wide <= end ? wide : 1;
      const uint8_t *blob = weight->blob + k * block_bytes;
      call.w = blob + panel * panel_bytes;
      const uint8_t *next = panel + width < end   ? call.w + width * panel_bytes
                         : k + 1 < k_blocks ? blob + block_bytes + begin * panel_bytes
                                               : weight->blob + following * panel_bytes;
      call.next_stride = (LINE + tiles - 1) / tiles;
      call.next = tiles == 1 && width == 1 ? call.w + NEAR : next;
      call.x = x_block;
      call.sums = sum + (panel - begin) * call.panel_sums;
      const Tile<W> tall = tile_of<W>(each_rows + 1, width), low = tile_of<W>(each_rows, width);
      for (int32_t t = 0; t < tiles; t++) {
        const int32_t count = each_rows + (t < larger);
        (t < larger ? tall : low)(call);
        call.x += count * W::WORDS_PER_BLOCK;
        call.sums += count * PANEL;
        call.next += call.steps * call.next_stride;
      }
    }
  }
  for (int32_t panel = begin; panel < end; panel++)
    finish(row_begin, row_end, panel, sum + (panel - begin) * (int64_t)rows * PANEL);
}

template <class W>
void Product<W>::finish(int32_t row_begin, int32_t row_end, int32_t panel, const float *sum) const {
  const int32_t first = panel * PANEL;
  const int32_t width = weight->out_features - first < PANEL ? weight->out_features - first : PANEL;
  const float *bias = weight->bias ? weight->bias + first : nullptr;
  for (int64_t row = row_begin; row < row_end; row++, sum += PANEL) {
    const float *before = residual ? residual + row * residual_stride + first : nullptr;
    float *to = y + row * y_stride + first;
    if (width == PANEL) {
      for (int i = 0; i < PANEL; i += LANES) {
        F32 v = load<F32>(sum + i);
        if (bias) v += load<F32>(bias + i);
        if (before) v += load<F32>(before + i);
        store(to + i, v);
      }
      continue;
    }
    for (int i = 0; i < width; i++) {
      float v = sum[i];
      if (bias) v += bias[i];
      if (before) v += before[i];
      to[i] = v;
    }
  }
}

// Copy the activations K block by K block: at their own strides (powers of two) they would evict each other. rows: those of
// the tokens, or NULL.
template <class W>
const typename W::Word *arrange(const float *x, int64_t x_stride, const int32_t *x_rows, int32_t tokens,
                                int32_t token_blocks, int32_t in_features, int32_t k_blocks) {
  typedef typename W::Word Word;
  Word *to = reinterpret_cast<Word *>(activations.of((int64_t)tokens * k_blocks * BLOCK));
  auto arrange_block = [=](int32_t item) {
    const int64_t begin = begin_of(tokens, token_blocks, item / k_blocks), k = item % k_blocks;
    const int64_t rows = begin_of(tokens, token_blocks, item / k_blocks + 1) - begin;
    const int64_t columns = k + 1 < k_blocks ? BLOCK : in_features - k * BLOCK;
    Word *block = to + (begin * k_blocks + k * rows) * W::WORDS_PER_BLOCK;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t from = x_rows ? x_rows[begin + row] : begin + row;
      W::copy(x + from * x_stride + k * BLOCK, columns, block + row * W::WORDS_PER_BLOCK);
    }
  };
  const int32_t items = token_blocks * k_blocks;
  if ((int64_t)tokens * in_features >= 1 << 17)
    for_each(items, [&](int32_t item) { arrange_block(item); });
  else
    for (int32_t item = 0; item < items; item++) arrange_block(item);
  return to;
}

// Panels that one item takes: about 128 KiB of weights, sums that stay in L2, and four items a thread if there are
// enough.
inline int32_t group_of(int32_t panels, int64_t panel_bytes, int32_t block_tokens) {
  const int32_t wide = block_tokens <= MAX_ROWS ? panels_of(block_tokens) : panels_of(MAX_ROWS);
  int64_t group = (128 << 10) / panel_bytes;
  const int64_t share = panels / (4 * pool_threads()), few_sums = 1024 / block_tokens;
  if (group > share) group = share;
  if (group > few_sums) group = few_sums;
  return group < wide ? wide : group / wide * wide;
}

// A product of these tokens, for all of the weight's outputs; x_rows: where in x they are, or NULL.
template <class W>
Product<W> product_of(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const int32_t *x_rows) {
  Product<W> product;
  product.weight = weight;
  product.tokens = tokens;
  product.token_blocks = (tokens + BLOCK_ROWS - 1) / BLOCK_ROWS;
  product.k_blocks = (weight->in_features + BLOCK - 1) / BLOCK;
  product.panels = (weight->out_features + PANEL - 1) / PANEL;
  product.panel_bytes = (int64_t)(weight->in_features + W::K_PER_STEP - 1) / W::K_PER_STEP * LINE;
  product.x = arrange<W>(x, x_stride, x_rows, tokens, product.token_blocks, weight->in_features, product.k_blocks);
  return product;
}

template <class W>
void multiply(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
              int64_t y_stride, int64_t residual_stride) {
  Product<W> product = product_of<W>(weight, tokens, x, x_stride, nullptr);
  product.residual = residual;
  product.residual_stride = residual_stride;
  product.y = y;
  product.y_stride = y_stride;
  product.group =
      group_of(product.panels, product.panel_bytes, (tokens + product.token_blocks - 1) / product.token_blocks);
  const int32_t groups = (product.panels + product.group - 1) / product.group;
  const int32_t items = groups * product.token_blocks;
  if ((int64_t)tokens * weight->in_features * weight->out_features < SMALL_PRODUCT)
    for (int32_t item = 0; item < items; item++) product.run(item);
  else
    for_each(items, [&](int32_t item) { product.run(item); });
}

// body(the weight's format).
template <class F> void by_format(const StLinear &weight, F &&body) {
  if (weight.scheme != ST_BFLOAT16)
    body(Float32());
  else if (weight.extras & ST_ROUNDED_ACTIVATIONS)
    body(Bfloat16Pairs());
  else
    body(Bfloat16());
}

}  // namespace floats

void linear_float(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const float *residual,
                  float *y, int64_t y_stride, int64_t residual_stride) {
  if (tokens <= 0) return;
  floats::by_format(*weight, [&](auto format) {
    floats::multiply<decltype(format)>(weight, tokens, x, x_stride, residual, y, y_stride, residual_stride);
  });
}

}  // namespace ST_ISA

#include "low_rank.inl"
