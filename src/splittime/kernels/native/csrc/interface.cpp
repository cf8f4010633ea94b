// The C interface: chooses the instruction set, and composes a decoder layer. The kernels are in the *.inl files.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "reads.h"

int64_t bytes_read[READ_KINDS];

extern const Kernels amx_emulated_kernels __attribute__((weak));
#if defined(__x86_64__)
extern const Kernels avx2_kernels __attribute__((weak)), avx512_kernels __attribute__((weak));
extern const Kernels avx512bf16_kernels __attribute__((weak)), amx_kernels __attribute__((weak));
#endif

namespace {

// What was compiled in, worst first. setup.py leaves out what only tests use, and what the machine has not.
const std::vector<const Kernels *> ALL = [] {
  std::vector<const Kernels *> all = {
      &amx_emulated_kernels,
      &portable_kernels,
#if defined(__x86_64__)
      &avx2_kernels,
      &avx512_kernels,
      &avx512bf16_kernels,
      &amx_kernels,
#endif
  };
  all.erase(std::remove(all.begin(), all.end(), nullptr), all.end());
  return all;
}();
const int32_t COUNT = int32_t(ALL.size());

// Until somebody chooses. Without tiles: to ask whether they work starts a process.
int32_t best() {
  int32_t found = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  for (int32_t index = 0; index < COUNT; index++)
    if (ALL[index] != &amx_kernels && ALL[index]->runs()) found = index;
#else
  for (int32_t index = 0; index < COUNT; index++)
    if (ALL[index]->runs()) found = index;
#endif
  return found;
}

int32_t selected = best();

const Kernels &kernels() { return *ALL[selected]; }

// Memory that a layer's intermediate results live in; it grows to the largest step and stays.
struct Scratch {
  float *memory = nullptr;
  int64_t size = 0;
  ~Scratch() {
    if (memory) st_free(memory, size * sizeof(float));
  }
  // Raises nothing: without memory for it, the system ends the process, as for any array of the kernels.
  float *of(int64_t floats) {
    if (floats > size) {
      if (memory) st_free(memory, size * sizeof(float));
      memory = static_cast<float *>(st_allocate(floats * sizeof(float)));
      size = floats;
    }
    return memory;
  }
};
thread_local Scratch scratch;

int64_t rows_of(const StLinear *linear) {
  int64_t rows = 0;
  for (; linear; linear = linear->below) rows += linear->out_features;
  return rows;
}

// Each weight of a stack puts its outputs at their place.
void product(const StLinear *linear, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
             int64_t y_stride) {
  const int64_t residual_stride = residual == y ? y_stride : rows_of(linear);
  for (; linear; linear = linear->below) {
    kernels().linear(linear, tokens, x, x_stride, residual, y, y_stride, residual_stride);
    y += linear->out_features;
    if (residual) residual += linear->out_features;
  }
}

bool is_adapted(int32_t product, int32_t adapters, const StAdapted *adapted) {
  for (int32_t i = 0; i < adapters; i++)
    if (adapted[i].products[product]) return true;
  return false;
}

// Floats for the inner rows of what adapters add to the product of the largest ranks.
int64_t inner_floats(int32_t adapters, const StAdapted *adapted) {
  int64_t tokens = 0, most = 0;
  for (int32_t i = 0; i < adapters; i++) {
    tokens += adapted[i].count;
    for (const StLowRank *one : adapted[i].products)
      if (one && one->down.out_features > most) most = one->down.out_features;
  }
  return tokens * most;
}

// mix(y, width, out): what the mixer makes of its first product's rows, of `width`, for its last.
template <class Mix>
void run_layer(const StLayer &layer, int64_t tokens, int32_t adapters, const StAdapted *adapted, float *hidden, Mix &&mix) {
  const int64_t width = layer.qkv.in_features, mixed = layer.output.in_features;
  const int64_t qkv = rows_of(&layer.qkv), gate_up = rows_of(&layer.gate_up), half = gate_up / 2;
  const int64_t wide = qkv + mixed > gate_up + half ? qkv + mixed : gate_up + half;
  float *normed = scratch.of(tokens * (width + wide) + inner_floats(adapters, adapted));
  float *a = normed + tokens * width, *thin = a + tokens * wide;
  const Kernels &k = kernels();
  const auto adapt = [&](int32_t product, const float *x, int64_t x_width, float *y, int64_t y_width) {
    if (adapters) k.add_low_rank(adapters, adapted, product, x, x_width, y, y_width, thin);
  };

  const auto normed_by = [&](const float *norm) -> const float * {
    if (norm) k.rms_norm(tokens, width, hidden, width, norm, layer.eps, normed);
    return norm ? normed : hidden;
  };
  // hidden += a product, with what adapters add to it, normed if there is a norm after it.
  const auto add = [&](const StLinear *linear, int32_t which, const float *x, int64_t x_width, const float *norm) {
    float *y = norm ? normed : hidden;
    product(linear, tokens, x, x_width, norm ? nullptr : hidden, y, width);
    adapt(which, x, x_width, y, width);
    if (norm) k.add_normed(tokens, width, y, norm, layer.eps, hidden);
  };

  float *heads = a, *out = a + tokens * qkv;
  const float *x = normed_by(layer.input_norm);
  product(&layer.qkv, tokens, x, width, nullptr, heads, qkv);
  adapt(ST_QKV, x, width, heads, qkv);
  mix(heads, qkv, out);
  add(&layer.output, ST_OUTPUT, out, mixed, layer.norm_after_mixer);

  float *inner = a + tokens * gate_up;
  x = normed_by(layer.mlp_norm);
  if (is_adapted(ST_GATE_UP, adapters, adapted) ||
      !k.linear_gated(&layer.gate_up, layer.activation, tokens, x, width, inner)) {
    product(&layer.gate_up, tokens, x, width, nullptr, a, gate_up);
    adapt(ST_GATE_UP, x, width, a, gate_up);
    k.gate(tokens, half, layer.activation, a, inner);
  }
  add(&layer.down, ST_DOWN, inner, half, layer.norm_after_mlp);
}

}  // namespace

extern "C" {

int32_t st_interface_version(void) { return ST_INTERFACE_VERSION; }
const char *st_isa_name(int32_t index) { return index >= 0 && index < COUNT ? ALL[index]->name : nullptr; }
int32_t st_isa_runs(int32_t index) { return index >= 0 && index < COUNT && ALL[index]->runs(); }
void st_isa_select(int32_t index) { selected = index; }
int32_t st_isa_selected(void) { return selected; }

void st_linear(const StLinear *linear, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
               int64_t y_stride) {
  product(linear, tokens, x, x_stride, residual, y, y_stride);
}

void st_rms_norm(int32_t tokens, int32_t width, const float *x, int64_t x_stride, const float *weight, float eps,
                 float *y) {
  kernels().rms_norm(tokens, width, x, x_stride, weight, eps, y);
}

void st_gate(int32_t tokens, int32_t inner, int32_t activation, const float *gate_up, float *y) {
  kernels().gate(tokens, inner, activation, gate_up, y);
}

void st_rope_write(const StBatch *batch, const StKv *kv, int32_t num_heads, const float *qk_norm, float eps, float *qkv) {
  kernels().rope_write(batch, kv, num_heads, qk_norm, eps, qkv);
}

void st_attention(const StBatch *batch, const StKv *kv, int32_t num_heads, int32_t window_tokens, const StScores *scores,
                  const float *q, int64_t q_stride, float *out) {
  kernels().attention(batch, kv, num_heads, window_tokens, *scores, q, q_stride, out);
}

void st_delta(const StDelta *net, const StStates *step, const float *products, int64_t stride, float *states, float *out) {
  kernels().delta(net, step, products, stride, states, out);
}

void st_draw(int32_t rows, int32_t vocab, const float *logits, const StDraw *draws, const uint32_t *bits, int32_t *tokens) {
  kernels().draw(rows, vocab, logits, draws, bits, tokens);
}

void st_argmax(int32_t rows, int32_t vocab, const float *logits, int32_t *tokens) {
  kernels().argmax(rows, vocab, logits, tokens);
}

void st_finite(int32_t rows, int32_t width, const float *x, uint8_t *is_finite) {
  kernels().finite(rows, width, x, is_finite);
}

void st_bytes_read(int64_t counts[READ_KINDS]) {
  for (int32_t kind = 0; kind < READ_KINDS; kind++) counts[kind] = __atomic_load_n(&bytes_read[kind], __ATOMIC_RELAXED);
}

void st_add_low_rank(int32_t adapters, const StAdapted *adapted, int32_t product, const float *x, int64_t x_stride, float *y,
                     int64_t y_stride) {
  kernels().add_low_rank(adapters, adapted, product, x, x_stride, y, y_stride, scratch.of(inner_floats(adapters, adapted)));
}

void st_layer(const StLayer *layer, const StBatch *batch, const StKv *kv, int32_t adapters, const StAdapted *adapted,
              float *hidden) {
  run_layer(*layer, batch->tokens, adapters, adapted, hidden, [&](float *heads, int64_t qkv, float *out) {
    kernels().rope_write(batch, kv, layer->num_heads, layer->qk_norm, layer->eps, heads);
    kernels().attention(batch, kv, layer->num_heads, layer->window_tokens, layer->scores, heads, qkv, out);
  });
}

void st_delta_layer(const StLayer *layer, const StDelta *net, const StStates *step, float *states, int32_t adapters,
                    const StAdapted *adapted, float *hidden) {
  run_layer(*layer, step->tokens, adapters, adapted, hidden, [&](const float *products, int64_t stride, float *out) {
    kernels().delta(net, step, products, stride, states, out);
  });
}

void st_release_pages(const void *begin, int64_t bytes) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  uintptr_t first = ((uintptr_t)begin + page - 1) / page * page, last = ((uintptr_t)begin + bytes) / page * page;
  if (last > first) madvise((void *)first, last - first, MADV_DONTNEED);
}

}  // extern "C"

// A mapping rounded up to whole huge pages. The system aligns large anonymous mappings by itself; where it does not, only
// the first and last pages are small.
static int64_t mapped_bytes(int64_t bytes) { return (bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20); }

extern "C" void *st_allocate(int64_t bytes) {
  void *begin = mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(begin, mapped_bytes(bytes), MADV_HUGEPAGE);
#endif
  return begin;
}

extern "C" void st_free(void *begin, int64_t bytes) { munmap(begin, mapped_bytes(bytes)); }
