// Gated delta nets over the rows of a step, token by token in float32. A call is three passes over items that threads take:
// the convolution, with norms of queries and keys and with the gates, of a head and a stretch of tokens; the recurrence, of
// a row and some panels of a head's state; the norm of what that gave. Each sum is of one token, along one dimension, in
// one order: neither where a prompt is cut, nor a row's neighbours, nor the number of threads change a bit of a result.
//
// A slot has the state S of each value head, then the last inputs of the convolution, [conv_width - 1][channels], oldest
// first. S is kept in panels of columns, [key_dim][PANEL] each, the last narrower where value_dim asks for it. Columns know
// nothing of each other, so a panel, which stays in the first-level cache, is taken through all tokens of its row.
namespace ST_ISA::deltas {

constexpr int32_t PANEL = 32;  // columns; whatever the instruction set, so that slots are alike
constexpr int32_t VECTORS = PANEL / LANES;
constexpr int32_t LINE = 16 / LANES;  // vectors of a line of the cache
constexpr int32_t TOKENS_OF_AN_ITEM = 64;
constexpr int32_t ITEMS_OF_A_THREAD = 4;  // fewer heads than that, and they are shared out by their panels

inline int32_t wide(int32_t dim) { return (dim + PANEL - 1) / PANEL * PANEL; }

// LANES floats, or zeros beyond `count`.
ST_INLINE F32 load_some(const float *p, int32_t count) {
  if (count >= LANES) return load<F32>(p);
  F32 v = {};
  if (count > 0) memcpy(&v, p, count * sizeof *p);
  return v;
}

// Of a token and a value head: what S is multiplied by, and how much of the change is made.
struct Gates {
  float decay, strength;
};

// One call. inputs: what the convolution made of queries, keys and values, a head after the other, [T][wide] each; values
// give place to the results. gates: [num_value_heads][T].
struct Call {
  const StDelta &net;
  const StStates &step;
  const float *products;
  int64_t stride;
  float *states, *inputs;
  Gates *gates;

  int32_t key_heads() const { return 2 * net.num_key_heads; }  // and those of queries, which come first
  int32_t dim_of(int32_t head) const { return head < key_heads() ? net.key_dim : net.value_dim; }
  int32_t channel_of(int32_t head) const { return of_heads(head, net.key_dim, net.value_dim); }
  int32_t channels() const { return channel_of(key_heads() + net.num_value_heads); }
  int64_t head_floats() const { return (int64_t)net.key_dim * net.value_dim; }
  int64_t state_floats() const {
    return net.num_value_heads * head_floats() + (int64_t)channels() * (net.conv_width - 1);
  }
  float *slot(int64_t index) const { return index < 0 ? nullptr : states + index * state_floats(); }
  float *last_inputs(int64_t index) const { return slot(index) + net.num_value_heads * head_floats(); }
  const float *token(int64_t index) const { return products + index * stride; }
  float *input(int32_t head, int64_t token) const {
    return inputs + of_heads(head, wide(net.key_dim), wide(net.value_dim)) * step.tokens + token * wide(dim_of(head));
  }
  float *value(int32_t head, int64_t token) const { return input(key_heads() + head, token); }

  // What the convolution was given `back` tokens before the token at `place` of a row; null: zeros.
  const float *convolved(int32_t row, int64_t place, int32_t back) const {
    if (place >= back) return token(step.begins[row] + place - back);
    const int64_t read = step.reads[row];
    return read < 0 ? nullptr : last_inputs(read) + (net.conv_width - 1 - back + place) * channels();
  }

 private:
  int64_t of_heads(int32_t head, int32_t of_key, int32_t of_value) const {
    const int32_t keys = head < key_heads() ? head : key_heads();
    return (int64_t)keys * of_key + (int64_t)(head - keys) * of_value;
  }
};

// An input of the convolution and what its channels are multiplied by.
struct Tap {
  const float *input, *factors;
};

// Sums of a head's channels over the taps, oldest first, through a SiLU; zeros behind `dim`.
ST_INLINE void convolve(const Tap *taps, int32_t num_taps, int32_t dim, float *to) {
  for (int32_t c = 0; c < wide(dim); c += LANES) {
    F32 sum = {};
    for (int32_t i = 0; i < num_taps; i++)
      sum = fma(load_some(taps[i].input + c, dim - c), load_some(taps[i].factors + c, dim - c), sum);
    store(to + c, gated_by(ST_SILU, sum, splat(1.0f)));
  }
}

inline Gates gates_of(const Call &call, int32_t head, int64_t token) {
  const StDelta &net = call.net;
  const float *b = call.token(token) + call.channels() + net.num_value_heads * net.value_dim;
  const float a = b[net.num_value_heads + head] + net.dt_bias[head];
  const float softplus = a > 20 ? a : log1pf(expf(a));  // as torch has it
  return {expf(net.decay[head] * softplus), 1 / (1 + expf(-b[head]))};
}

// The first pass, of one head and tokens [begin, end).
inline void prepare(const Call &call, int32_t head, int32_t begin, int32_t end) {
  static thread_local Room<Tap> memory;
  const StDelta &net = call.net;
  const int32_t dim = call.dim_of(head), channel = call.channel_of(head), width = net.conv_width;
  Tap *taps = memory.of(width);
  const float length = head < net.num_key_heads ? 1 / sqrtf((float)dim) : 1;  // of queries, keys
  for (int32_t token = begin, row = 0; token < end; token++) {
    while (call.step.begins[row + 1] <= token) row++;
    int32_t num_taps = 0;
    for (int32_t i = 0; i < width; i++)
      if (const float *input = call.convolved(row, token - call.step.begins[row], width - 1 - i))
        taps[num_taps++] = {input + channel, net.conv + i * call.channels() + channel};
    float *to = call.input(head, token);
    convolve(taps, num_taps, dim, to);
    if (head < call.key_heads()) {
      const float factor = length / sqrtf(sum_of_squares(to, wide(dim)) + net.length_eps);
      for (int32_t c = 0; c < wide(dim); c += LANES) store(to + c, load<F32>(to + c) * factor);
    } else {
      const int32_t value_head = head - call.key_heads();
      call.gates[(int64_t)value_head * call.step.tokens + token] = gates_of(call, value_head, token);
    }
  }
}

// S^T k; S is left multiplied by `decay`.
ST_INLINE void recall(const float *state, const float *key, int32_t key_dim, float decay, float *to,
                      F32 (&recalled)[VECTORS]) {
  F32 sums[VECTORS] = {};
  for (int32_t i = 0; i < key_dim; i++) {
    const F32 k = splat(key[i]);
    ST_UNROLL for (int v = 0; v < VECTORS; v++) {
      const F32 s = load<F32>(state + i * PANEL + v * LANES);
      sums[v] = fma(s, k, sums[v]);
      store(to + i * PANEL + v * LANES, s * decay);
    }
  }
  ST_UNROLL for (int v = 0; v < VECTORS; v++) recalled[v] = sums[v];
}

// S <- S + k change^T, and S^T q of that into `results`. If GOES_ON, the next token's `recall` in the same sweep: a sum or a
// product of each element has one order and one rounding in both, so that they may be exchanged. If
// not, the panel behind this one is fetched, which comes next: decodes wait for memory.
template <bool GOES_ON>
ST_INLINE void take(float *state, const float *query, const float *key, const float *next_key, int32_t key_dim,
                    float next_decay, const F32 (&change)[VECTORS], F32 (&results)[VECTORS],
                    F32 (&recalled)[VECTORS]) {
  F32 sums[VECTORS] = {}, next[VECTORS] = {};
  for (int32_t i = 0; i < key_dim; i++) {
    const F32 k = splat(key[i]), q = splat(query[i]), next_k = splat(next_key[i]);
    ST_UNROLL for (int v = 0; v < VECTORS; v++) {
      float *at = state + i * PANEL + v * LANES;
      const F32 s = fma(k, change[v], load<F32>(at));
      sums[v] = fma(s, q, sums[v]);
      if (GOES_ON) next[v] = fma(s, next_k, next[v]);
      else if (v % LINE == 0) __builtin_prefetch(at + (int64_t)PANEL * key_dim, 1);
      store(at, GOES_ON ? s * next_decay : s);
    }
  }
  ST_UNROLL for (int v = 0; v < VECTORS; v++) results[v] = sums[v], recalled[v] = next[v];
}

// Tokens [begin, end) of a panel of a value head; the state before them is at `from`, that behind them is left in `state`.
inline void run(const Call &call, int32_t head, int32_t panel, int64_t begin, int64_t end, const float *from, float *state) {
  const StDelta &net = call.net;
  const int32_t key_dim = net.key_dim, query_head = head / (net.num_value_heads / net.num_key_heads);
  const int32_t wide_key = wide(key_dim), wide_value = wide(net.value_dim);
  const float *query = call.input(query_head, begin), *key = call.input(net.num_key_heads + query_head, begin);
  const Gates *gates = call.gates + (int64_t)head * call.step.tokens + begin;
  float *value = call.value(head, begin) + panel * PANEL;
  F32 recalled[VECTORS], change[VECTORS], results[VECTORS];
  recall(from, key, key_dim, gates->decay, state, recalled);
  for (int64_t left = end - begin; left > 0; left--) {
    ST_UNROLL for (int v = 0; v < VECTORS; v++)
      change[v] = (load<F32>(value + v * LANES) - recalled[v] * gates->decay) * gates->strength;
    if (left > 1) take<true>(state, query, key, key + wide_key, key_dim, gates[1].decay, change, results, recalled);
    else take<false>(state, query, key, key, key_dim, 1, change, results, recalled);
    ST_UNROLL for (int v = 0; v < VECTORS; v++) store(value + v * LANES, results[v]);
    query += wide_key, key += wide_key, value += wide_value, gates++;
  }
}

// Rows of a panel, `step` floats apart; zeros if there is nothing to copy.
inline void copy_panel(const float *from, int32_t step, int32_t width, int32_t rows, float *to, int32_t to_step) {
  for (int32_t i = 0; i < rows; i++) {
    if (from) memcpy(to + (int64_t)i * to_step, from + (int64_t)i * step, width * sizeof *to);
    else memset(to + (int64_t)i * to_step, 0, width * sizeof *to);
  }
}

// The second pass, of one row and one panel of a value head. A narrow panel is worked on beside its slot.
inline void run_panel(const Call &call, int32_t row, int32_t head, int32_t panel) {
  static thread_local Room<float> memory;
  const StStates &step = call.step;
  const int32_t rest = call.net.value_dim - panel * PANEL, width = rest < PANEL ? rest : PANEL, key_dim = call.net.key_dim;
  const auto place = [&](int64_t slot) {
    float *begin = call.slot(slot);
    return begin ? begin + head * call.head_floats() + (int64_t)panel * PANEL * key_dim : nullptr;
  };
  float *to = place(step.writes[row]), *state = width == PANEL ? to : memory.of(PANEL * key_dim);
  const float *from = place(step.reads[row]);
  if (state != to || !from) copy_panel(from, width, width, key_dim, state, PANEL), from = state;
  for (int64_t begin = step.begins[row], at = begin, end = step.begins[row + 1];;) {
    int64_t stop = end;
    for (const int64_t *keep = step.keeps; keep < step.keeps + 3 * step.num_keeps; keep += 3) {
      if (keep[0] != row) continue;
      if (begin + keep[1] == at) copy_panel(from, PANEL, width, key_dim, place(keep[2]), width);
      if (begin + keep[1] > at && begin + keep[1] < stop) stop = begin + keep[1];
    }
    if (at == end) break;
    run(call, head, panel, at, stop, from, state);
    from = state, at = stop;
  }
  if (from != to) copy_panel(from, PANEL, width, key_dim, to, width);
}

// Leaves the last inputs of the convolution behind `count` of a row's tokens in a slot, which may be the one that was read.
inline void keep_inputs(const Call &call, int32_t row, int64_t count, int64_t slot) {
  const int64_t channels = call.channels();
  for (int32_t i = 0; i + 1 < call.net.conv_width; i++) {
    const float *from = call.convolved(row, count, call.net.conv_width - 1 - i);
    float *to = call.last_inputs(slot) + i * channels;
    if (from != to) copy_panel(from, channels, channels, 1, to, channels);
  }
}

inline void keep_inputs_of(const Call &call, int32_t row) {
  const StStates &step = call.step;
  for (const int64_t *keep = step.keeps; keep < step.keeps + 3 * step.num_keeps; keep += 3)
    if (keep[0] == row) keep_inputs(call, row, keep[1], keep[2]);
  keep_inputs(call, row, step.begins[row + 1] - step.begins[row], step.writes[row]);
}

// Panels of each row's heads, as many to an item as leave enough items; and an item of each row for its last inputs.
inline void run_rows(const Call &call) {
  const int32_t heads = call.net.num_value_heads, panels = wide(call.net.value_dim) / PANEL;
  const bool is_shared = (int64_t)call.step.rows * heads < ITEMS_OF_A_THREAD * pool_threads();
  const int32_t each = is_shared ? 1 : panels, of_head = panels / each, of_row = heads * of_head + 1;
  for_each(call.step.rows * of_row, [&](int32_t item) {
    const int32_t row = call.step.rows - 1 - item / of_row, within = item % of_row;  // longer rows come last in a batch
    if (within == of_row - 1) return keep_inputs_of(call, row);
    for (int32_t i = 0; i < each; i++) run_panel(call, row, within / of_head, within % of_head * each + i);
  });
}

}  // namespace ST_ISA::deltas

namespace ST_ISA {

void delta(const StDelta *net, const StStates *step, const float *products, int64_t stride, float *states, float *out) {
  using namespace deltas;
  static thread_local Room<float> memory;
  const int32_t value_heads = net->num_value_heads, heads = 2 * net->num_key_heads + value_heads, dim = net->value_dim;
  const int64_t tokens = step->tokens;
  const int64_t inputs = 2 * net->num_key_heads * wide(net->key_dim) + value_heads * wide(dim), gates = 2 * value_heads;
  float *begin = memory.of(tokens * (inputs + gates));
  const Call call = {*net, *step, products, stride, states, begin, (Gates *)(begin + tokens * inputs)};
  for_each(heads * (int32_t)((tokens + TOKENS_OF_AN_ITEM - 1) / TOKENS_OF_AN_ITEM), [&](int32_t item) {
    const int64_t first = item / heads * TOKENS_OF_AN_ITEM, last = first + TOKENS_OF_AN_ITEM;
    prepare(call, item % heads, first, last < tokens ? last : tokens);
  });
  run_rows(call);
  for_tokens(step->tokens, value_heads * dim, [&](int32_t first, int32_t last) {
    for (int64_t token = first; token < last; token++)
      for (int32_t head = 0; head < value_heads; head++) {
        float *to = out + (token * value_heads + head) * dim;
        norm_row(call.value(head, token), dim, net->norm, net->eps, to);
        gate_row(ST_SILU, call.token(token) + call.channels() + head * dim, to, dim, to);
      }
  });
}

}  // namespace ST_ISA
