// What adapters add to a product: y += (x down^T) up^T, each on its own tokens, whose rows are read and written where they
// are. Two rounds: the inner rows of all adapters (shrink), then what comes of them (expand). An item of a round is one
// weight's product of some tokens and some panels, on one thread. It copies a bounded number of rows; a token's sums run
// over the same blocks of columns whatever the item.
namespace ST_ISA {
namespace floats {

constexpr int32_t ITEM_TOKENS = 12, ITEM_PANELS = 64;
constexpr int64_t NEAR_OUTPUTS = 8 * PANEL;  // to fetch ahead in a row of y

// The outputs of some panels for a tile of inner rows, over one block of columns.
template <class Word> struct Expansion {
  const Word *x;  // rows WORDS_PER_BLOCK apart
  const uint8_t *w;
  int64_t panel_bytes;
  int32_t steps, outputs;
  float *y[ITEM_TOKENS];
};

// y[r] += the products of R rows and P panels. The sums stay in registers, since few columns make one.
template <class W, int R, int P>
inline void expand_panels(const Expansion<typename W::Word> &call, const uint8_t *w, float *const *y, int64_t at) {
  F32 sum[P * VECTORS][R] = {};
  const typename W::Word *x = call.x;
  for (int32_t step = 0; step < call.steps; step++, w += LINE, x += W::K_PER_STEP * W::WORDS_PER_BLOCK / BLOCK) {
    for (int p = 0; p < P; p++) __builtin_prefetch(w + p * call.panel_bytes + NEAR);
    W::template step<R, P>(x, w, call.panel_bytes, sum);
  }
  each<P * VECTORS>([&](auto i) __attribute__((always_inline)) {
    each<R>([&](auto r) __attribute__((always_inline)) {
      float *to = y[r] + at + i * LANES;
      store(to, load<F32>(to) + sum[i][r]);
    });
  });
}

template <class W, int R> void expand_tile(const Expansion<typename W::Word> &call) {
  constexpr int P = panels_of(R), WIDE = P * PANEL;
  int32_t at = 0;
  const auto panel = [&] { return call.w + at / PANEL * call.panel_bytes; };
  for (; at + WIDE <= call.outputs; at += WIDE) {
    for (int r = 0; r < R; r++) __builtin_prefetch(call.y[r] + at + NEAR_OUTPUTS, 1);
    expand_panels<W, R, P>(call, panel(), call.y, at);
  }
  for (; at + PANEL <= call.outputs; at += PANEL) expand_panels<W, R, 1>(call, panel(), call.y, at);
  if (at == call.outputs) return;
  const int64_t bytes = (call.outputs - at) * sizeof(float);
  float last[R][PANEL] = {}, *lasts[R];
  for (int r = 0; r < R; r++) memcpy(lasts[r] = last[r], call.y[r] + at, bytes);
  expand_panels<W, R, 1>(call, panel(), lasts, 0);
  for (int r = 0; r < R; r++) memcpy(call.y[r] + at, last[r], bytes);
}

template <class W, int R = MAX_ROWS> void expand_rows(int rows, const Expansion<typename W::Word> &call) {
  if (rows == R) return expand_tile<W, R>(call);
  if constexpr (R > 1) expand_rows<W, R - 1>(rows, call);
}

// A weight's product on an adapter's tokens: shrink reads their rows of x and writes inner rows, [count][y_stride]; expand
// reads inner rows and adds to the tokens' rows of y.
struct Thin {
  bool expands;
  const StLinear *weight;
  const int32_t *tokens;
  int32_t count;
  const float *x;
  int64_t x_stride;
  float *y;
  int64_t y_stride;

  int32_t token_blocks() const { return (count + ITEM_TOKENS - 1) / ITEM_TOKENS; }
  int32_t items() const { return token_blocks() * ((weight->out_features - 1) / (PANEL * ITEM_PANELS) + 1); }
  int64_t products() const { return (int64_t)count * weight->in_features * weight->out_features; }
  void run(int32_t item) const;
  template <class W> void shrink(int32_t begin, int32_t end, int32_t group) const;
  template <class W> void expand(int32_t begin, int32_t end, int32_t group) const;
};

void Thin::run(int32_t item) const {
  const int32_t blocks = token_blocks(), group = item / blocks;
  const int32_t begin = begin_of(count, blocks, item % blocks), end = begin_of(count, blocks, item % blocks + 1);
  by_format(*weight, [&](auto format) {
    expands ? expand<decltype(format)>(begin, end, group) : shrink<decltype(format)>(begin, end, group);
  });
}

template <class W> void Thin::shrink(int32_t begin, int32_t end, int32_t group) const {
  Product<W> product = product_of<W>(weight, end - begin, x, x_stride, tokens + begin);
  product.residual = nullptr;
  product.y = y + begin * y_stride;
  product.y_stride = y_stride;
  product.group = ITEM_PANELS;
  product.run(group);
}

template <class W> void Thin::expand(int32_t begin, int32_t end, int32_t group) const {
  alignas(LINE) typename W::Word inner[ITEM_TOKENS * W::WORDS_PER_BLOCK];
  const int32_t first = group * ITEM_PANELS * PANEL, left = weight->out_features - first;
  const int32_t tiles = (end - begin + MAX_ROWS - 1) / MAX_ROWS;
  Expansion<typename W::Word> call;
  call.panel_bytes = (int64_t)(weight->in_features + W::K_PER_STEP - 1) / W::K_PER_STEP * LINE;
  call.outputs = left < ITEM_PANELS * PANEL ? left : ITEM_PANELS * PANEL;
  for (int32_t k = 0; k < weight->in_features; k += BLOCK) {
    const int32_t columns = weight->in_features - k < BLOCK ? weight->in_features - k : BLOCK;
    call.steps = (columns + W::K_PER_STEP - 1) / W::K_PER_STEP;
    call.w = weight->blob + first / PANEL * call.panel_bytes + (int64_t)k / W::K_PER_STEP * LINE;
    for (int32_t row = begin; row < end; row++)
      W::copy(x + row * x_stride + k, columns, inner + (row - begin) * W::WORDS_PER_BLOCK);
    for (int32_t tile = 0; tile < tiles; tile++) {
      const int32_t from = begin_of(end - begin, tiles, tile), rows = begin_of(end - begin, tiles, tile + 1) - from;
      for (int32_t r = 0; r < rows; r++) call.y[r] = y + tokens[begin + from + r] * y_stride + first;
      call.x = inner + from * W::WORDS_PER_BLOCK;
      expand_rows<W>(rows, call);
    }
  }
}

// One call. inner: [tokens of all adapters that add something][their ranks].
struct Addition {
  int32_t adapters;
  const StAdapted *adapted;
  int32_t product;
  const float *x;
  int64_t x_stride;
  float *y;
  int64_t y_stride;
  float *inner;

  // visit(thin) of a round's products one after the other, until it returns true.
  template <class F> void of_round(bool expands, F &&visit) const;
  void run_round(bool expands) const;
};

template <class F> void Addition::of_round(bool expands, F &&visit) const {
  float *rows = inner;
  for (int32_t i = 0; i < adapters; i++) {
    const StAdapted &mine = adapted[i];
    const StLowRank *one = mine.products[product];
    if (!one || mine.count <= 0) continue;
    const int64_t rank = one->down.out_features;
    if (!expands && visit(Thin{false, &one->down, mine.tokens, mine.count, x, x_stride, rows, rank})) return;
    const float *read = rows;
    for (int32_t part = 0; expands && part < one->num_parts; read += one->parts[part++].in_features)
      if (visit(Thin{true, &one->parts[part], mine.tokens, mine.count, read, rank, y + one->begins[part], y_stride}))
        return;
    rows += mine.count * rank;
  }
}

void Addition::run_round(bool expands) const {
  int32_t items = 0;
  int64_t products = 0;
  of_round(expands, [&](const Thin &thin) {
    items += thin.items(), products += thin.products();
    count_weight(*thin.weight);
    return false;
  });
  const auto run = [&](int32_t item) {
    of_round(expands, [&](const Thin &thin) {
      const int32_t here = thin.items();
      if (item < here) return thin.run(item), true;
      return item -= here, false;
    });
  };
  if (products < SMALL_PRODUCT)
    for (int32_t item = 0; item < items; item++) run(item);
  else
    for_each(items, run);
}

}  // namespace floats

void add_low_rank(int32_t adapters, const StAdapted *adapted, int32_t product, const float *x, int64_t x_stride, float *y,
                  int64_t y_stride, float *inner) {
  const floats::Addition addition = {adapters, adapted, product, x, x_stride, y, y_stride, inner};
  addition.run_round(false);
  addition.run_round(true);
}

}  // namespace ST_ISA
