// What adapters add to a product: y += (x down^T) up^T, each on its own tokens, whose rows are read and written where they
// are. Two rounds: the inner rows of all adapters, then what comes of them. An item of a round is one weight's product of
// some tokens and some panels, on one thread: it takes from memory a bounded number of rows, and a token's sums run over
// the same blocks of columns whatever the item, as those of linear_float.inl do.
namespace ST_ISA {
namespace floats {

constexpr int32_t ITEM_TOKENS = 12, ITEM_PANELS = 64;

// A weight's product on some of an adapter's tokens. x_rows, y_rows: where they are in x and in y; NULL: in order.
struct Thin {
  const StLinear *weight;
  int32_t count;
  const float *x;
  int64_t x_stride;
  const int32_t *x_rows;
  float *y;
  int64_t y_stride;
  const int32_t *y_rows;
  bool adds;

  int32_t token_blocks() const { return (count + ITEM_TOKENS - 1) / ITEM_TOKENS; }
  int32_t items() const { return token_blocks() * ((weight->out_features - 1) / (PANEL * ITEM_PANELS) + 1); }
  int64_t products() const { return (int64_t)count * weight->in_features * weight->out_features; }
  void run(int32_t item) const;
};

void Thin::run(int32_t item) const {
  const int64_t blocks = token_blocks(), begin = begin_of(count, blocks, item % blocks);
  const int64_t tokens = begin_of(count, blocks, item % blocks + 1) - begin;
  by_format(*weight, [&](auto format) {
    const float *from = x_rows ? x : x + begin * x_stride;
    auto product = product_of<decltype(format)>(weight, tokens, from, x_stride, x_rows ? x_rows + begin : nullptr);
    product.y = y_rows ? y : y + begin * y_stride;
    product.rows = y_rows ? y_rows + begin : nullptr;
    product.residual = adds ? product.y : nullptr;
    product.y_stride = product.residual_stride = y_stride;
    product.group = ITEM_PANELS;
    product.run(item / blocks);
  });
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
  template <class F> void of_round(bool is_second, F &&visit) const;
  void run_round(bool is_second) const;
};

template <class F> void Addition::of_round(bool is_second, F &&visit) const {
  float *rows = inner;
  for (int32_t i = 0; i < adapters; i++) {
    const StAdapted &mine = adapted[i];
    const StLowRank *one = mine.products[product];
    if (!one || mine.count <= 0) continue;
    const int64_t rank = one->down.out_features;
    if (!is_second && visit(Thin{&one->down, mine.count, x, x_stride, mine.tokens, rows, rank, nullptr, false})) return;
    const float *read = rows;
    for (int32_t part = 0; is_second && part < one->num_parts; read += one->parts[part++].in_features)
      if (visit(Thin{&one->parts[part], mine.count, read, rank, nullptr, y + one->begins[part], y_stride, mine.tokens, true}))
        return;
    rows += mine.count * rank;
  }
}

void Addition::run_round(bool is_second) const {
  int32_t items = 0;
  int64_t products = 0;
  of_round(is_second, [&](const Thin &thin) {
    items += thin.items(), products += thin.products();
    count_weight(*thin.weight);
    return false;
  });
  const auto run = [&](int32_t item) {
    of_round(is_second, [&](const Thin &thin) {
      const int32_t here = thin.items();
      if (item < here) return thin.run(item), true;
      return item -= here, false;
    });
  };
  if (products < SMALL_PRODUCT)
    for (int32_t item = 0; item < items; item++) run(item);
  else
    for_each(items, [&](int32_t item) { run(item); });
}

}  // namespace floats

void add_low_rank(int32_t adapters, const StAdapted *adapted, int32_t product, const float *x, int64_t x_stride, float *y,
                  int64_t y_stride, float *inner) {
  const floats::Addition addition = {adapters, adapted, product, x, x_stride, y, y_stride, inner};
  addition.run_round(false);
  addition.run_round(true);
}

}  // namespace ST_ISA
