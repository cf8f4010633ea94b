/* The C interface of splittime's CPU kernels: plain pointers and sizes, no torch, no Python, no exceptions.
 *
 * Every activation is float32. A *token* is one row of an activation matrix. Arrays are C-contiguous unless a stride (in
 * elements) is given. The caller owns every buffer and checks every shape: these functions trust what they are given.
 * They run on the calling thread and on the pool that st_set_threads made; one call at a time runs in parallel, others
 * wait for it.
 */
#ifndef SPLITTIME_H
#define SPLITTIME_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define ST_INTERFACE_VERSION 13 /* raised with any change here; kernels/native/library.py refuses another */

enum { ST_FLOAT32 = 0, ST_BFLOAT16 = 1, ST_INT8 = 2, ST_INT4 = 3, ST_FLOAT16 = 4 };

/* What a group of an integer weight comes with besides its scale, added up: a zero point (of ST_INT4; without it 8), a
 * minimum that is taken off. One of the two: scale * (q - zero) - minimum is scale * (q - 8) less a higher minimum. */
enum { ST_ZEROS = 1, ST_MINIMA = 2 };

/* For ST_BFLOAT16: activations are rounded to bfloat16 before the product, as the processor's products of bfloat16 want
 * it. Without it they stay float32, whatever the processor. */
enum { ST_ROUNDED_ACTIVATIONS = 4 };

/* For weights of integers that st_pack rounds: rows of weights and of activations are turned before they are rounded
 * (turn.inl), so that one large column does not make the steps of all others coarse. */
enum { ST_TURNED = 8 };

/* Of weights that come as integers: scales and minima are whole multiples of a step, one step for each row and 256 columns.
 * There are three: ST_INT4 in groups of 32 with minima; ST_INT8 in groups of 32 with minima and ST_FIVE, of integers of 5 bits
 * (-16..15); and ST_INT8 in groups of 16, of 6 bits (-32..31). */
enum { ST_STEPS = 16, ST_FIVE = 32 };

/* A weight [out_features, in_features] in the layout of its scheme, `blob` made by st_pack or st_pack_rounded.
 * group: columns that share a scale: of ST_INT4 a multiple of 32; of ST_INT8 a multiple of 16, or 0 for one scale a row.
 * extras: ST_ZEROS or ST_MINIMA, ST_STEPS and ST_FIVE, or ST_TURNED; of ST_BFLOAT16 ST_ROUNDED_ACTIVATIONS; or 0.
 * bias: [out_features] or NULL. columns: [in_features] or NULL, of integer weights: the j-th column multiplies
 * x[columns[j]]. below: the weight whose outputs follow this one's, or NULL; it has the same in_features and may have another scheme and other columns. */
typedef struct StLinear {
  int32_t scheme, out_features, in_features, group, extras;
  const uint8_t *blob;
  const float *bias;
  const int32_t *columns;
  const struct StLinear *below;
} StLinear;

/* One layer's KV store: [num_blocks + 1][2][num_kv_heads] tiles, keys then values. A key tile is transposed,
 * [head_dim][block_size]; a value tile is [block_size][head_dim]. type: ST_FLOAT32, ST_BFLOAT16 or ST_INT8.
 * scales: for ST_INT8, [num_blocks + 1][2][num_kv_heads][block_size], value = stored * scale; else NULL. */
typedef struct {
  int32_t type, num_blocks, block_size, num_kv_heads, head_dim;
  void *data;
  float *scales;
} StKv;

/* One step: R rows, T tokens; see splittime.kernels.api.AttentionBatch. The first decode_rows rows have one token.
 * turns: [T][head_dim / 2] pairs (cos, sin). */
typedef struct {
  int32_t rows, tokens, decode_rows, max_blocks;
  const int32_t *query_begins;  /* [R + 1] */
  const int32_t *context_lens;  /* [R] */
  const int32_t *block_tables;  /* [R][max_blocks] */
  const int32_t *token_blocks;  /* [T] */
  const int32_t *token_offsets; /* [T] */
  const float *turns;
} StBatch;

/* How scores become weights: multiplied by `scale`; then a score s becomes cap * tanh(s / cap), unless cap is 0. sinks:
 * [num_heads], the score of a token that every query sees and whose values are 0, or NULL. */
typedef struct {
  float scale, cap;
  const float *sinks;
} StScores;

/* A gated delta net (splittime.kernels.layer.DeltaSpec). conv: [conv_width][channels], the newest token's last, channels
 * being those of num_key_heads queries, as many keys, and num_value_heads values. decay, dt_bias: [num_value_heads]. norm:
 * [value_dim]. num_key_heads divides num_value_heads. */
typedef struct {
  int32_t num_key_heads, num_value_heads, key_dim, value_dim, conv_width;
  float length_eps, eps; /* of queries and keys; of the norm */
  const float *conv, *decay, *dt_bias, *norm;
} StDelta;

/* Which states the rows of a step go on from, where they leave them, and where else a row's state behind some of its tokens
 * is left: splittime.kernels.api.StateBatch. Row r's tokens are [begins[r], begins[r + 1]). */
typedef struct {
  int32_t rows, tokens, num_keeps;
  const int64_t *begins; /* [R + 1] */
  const int64_t *reads;  /* [R], -1 for zeros */
  const int64_t *writes; /* [R] */
  const int64_t *keeps;  /* [num_keeps][3]: row, count, slot */
} StStates;

enum { ST_SILU = 0, ST_GELU = 1 }; /* what an MLP's gates pass; GELU by its approximation with a tanh */

/* A dense decoder layer. Norms of what its two parts are given, and of what they add, are NULL where there are none. qk_norm:
 * [num_heads + num_kv_heads][head_dim] or NULL. window_tokens: 0 for none. */
typedef struct {
  StLinear qkv, output, gate_up, down;
  const float *input_norm, *mlp_norm, *norm_after_mixer, *norm_after_mlp, *qk_norm;
  StScores scores;
  float eps;
  int32_t num_heads, window_tokens, activation;
} StLayer;

/* What an adapter adds to a product: its parts' weights, [outputs][rank] each, times `down`, [sum of the ranks][in]. A
 * part reads the outputs of `down` behind those that the part before reads; what it gives is added from output
 * begins[part] on. All are of ST_FLOAT32 or ST_BFLOAT16, without bias and with nothing below. */
typedef struct {
  StLinear down;
  int32_t num_parts;
  const StLinear *parts;
  const int32_t *begins;
} StLowRank;

enum { ST_QKV = 0, ST_OUTPUT = 1, ST_GATE_UP = 2, ST_DOWN = 3, ST_PRODUCTS = 4 }; /* of a layer */

/* An adapter in a step: what it adds to each product of a layer, NULL for nothing, on its own tokens, which are no other
 * adapter's. */
typedef struct {
  const StLowRank *products[ST_PRODUCTS];
  const int32_t *tokens;
  int32_t count;
} StAdapted;

int32_t st_interface_version(void);

/* Instruction sets: "amx_emulated" (for tests), "portable", "avx2", "avx512" (with VNNI), "avx512bf16", "amx".
 * st_isa_name(i) is the i-th that was compiled in, worst first, or NULL beyond the last; st_isa_runs(i) says whether this
 * CPU has it; st_isa_select chooses one that runs. */
const char *st_isa_name(int32_t index);
int32_t st_isa_runs(int32_t index);
void st_isa_select(int32_t index);
int32_t st_isa_selected(void);

/* Why "amx" does not run here; "" where it does. The first call tries the tiles in a child process, some milliseconds. */
const char *st_amx_refusal(void);

/* The calling thread counts as one. Returns how many there are, fewer if the system refuses more. */
int32_t st_set_threads(int32_t num_threads);

/* From now on the calling thread computes what it calls by itself, beside others that do. */
void st_work_alone(void);

/* Bytes of the blob of a packed weight (a multiple of 64; the blob must be aligned to 64 bytes). */
int64_t st_packed_bytes(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras);

/* Pack a weight [out, in] of dtype ST_FLOAT32, ST_BFLOAT16 or ST_FLOAT16; ST_INT8 and ST_INT4 round to nearest (ties to
 * even). ST_INT8: scale = max |w| / 127 over a row, or over a group, then stored as float16 and the integer clamped to
 * -127..127. ST_INT4: over a group, scale = m / -8 with m the value of largest magnitude (the first of equals), stored as
 * float16, and the integer round(w / scale) + 8 clamped to 0..15.
 * row_begin, row_end: pack these rows of the weight only (row_begin a multiple of 16), so that parts made of several
 * tensors, or several threads, fill one blob; `weight` points at row_begin's first element. */
void st_pack(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras, const void *weight,
             int32_t dtype, int32_t row_begin, int32_t row_end, uint8_t *blob);

/* Pack integers made elsewhere, rows [row_begin, row_end) as above, of a blob with these extras. values: [rows][in],
 * -128..127 for ST_INT8, 0..15 for ST_INT4. scales: [rows], or [rows][in / group rounded up], which is kept as float16.
 * zeros: [rows][groups] of 0..15, or NULL; minima: [rows][groups], kept as float16, or NULL. steps: NULL, or of ST_STEPS
 * [rows][in / 256 rounded up], with minima [rows][2][in / 256], the second of what minima + middle * scales are, middle being
 * 8 for ST_INT4 and 16 for ST_FIVE. Steps are kept as float16, and how many of them a scale is as int8. */
void st_pack_rounded(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras,
                     const int8_t *values, const float *scales, const uint8_t *zeros, const float *minima,
                     const float *steps, int32_t row_begin, int32_t row_end, uint8_t *blob);

/* The same of all rows, without minima. */
void st_pack_quantized(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, const int8_t *values,
                       const float *scales, const uint8_t *zeros, uint8_t *blob);

/* The weight that a blob stands for, float32 [out][in], its columns in the order of the blob, turned back where they were
 * turned; not what is below it. */
void st_unpack(const StLinear *linear, float *weight);

/* y = x W^T + bias (+ residual [tokens][out], which may be y itself), out being all rows, also those below. Weights of
 * integers: x is rounded (turned ones: turned first) to int8 with one scale a token, of weights in groups with one scale a token and group. A
 * token's result does not depend on the others, nor on their number, to the last bit. */
void st_linear(const StLinear *linear, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
               int64_t y_stride);

/* y += what the adapters add to `product`, on their tokens' rows of x and y. A token's result depends on no other token. */
void st_add_low_rank(int32_t adapters, const StAdapted *adapted, int32_t product, const float *x, int64_t x_stride, float *y,
                     int64_t y_stride);

/* y = x / sqrt(mean(x^2) + eps) * weight, over each row of `width`. */
void st_rms_norm(int32_t tokens, int32_t width, const float *x, int64_t x_stride, const float *weight, float eps, float *y);

/* gate_up [tokens][2 * inner] -> y [tokens][inner] = activation(gate) * up. */
void st_gate(int32_t tokens, int32_t inner, int32_t activation, const float *gate_up, float *y);

/* qkv [T][num_heads + 2 num_kv_heads][head_dim], in place: norm each query and key head (unless qk_norm is NULL), turn
 * adjacent pairs by the token's turns, and put keys and values at their places in the store. */
void st_rope_write(const StBatch *batch, const StKv *kv, int32_t num_heads, const float *qk_norm, float eps, float *qkv);

/* q: the first num_heads heads of rows of `q_stride` elements -> out [T][num_heads * head_dim]. Query head h reads KV head
 * h / (num_heads / num_kv_heads); a query at position p sees (p - window_tokens, p], all of [0, p] if that is 0. */
void st_attention(const StBatch *batch, const StKv *kv, int32_t num_heads, int32_t window_tokens, const StScores *scores,
                  const float *q, int64_t q_stride, float *out);

/* products: rows of `stride` elements, queries, keys, values [channels], then z [num_value_heads * value_dim], b and a
 * [num_value_heads] each -> out [tokens][num_value_heads * value_dim], normed and times the SiLU of z. states: slots of
 * num_value_heads * key_dim * value_dim + channels * (conv_width - 1) floats. A token's result and the state behind it depend
 * on the row's tokens up to it alone, to the last bit, and not on which of them came in earlier calls. */
void st_delta(const StDelta *net, const StStates *step, const float *products, int64_t stride, float *states, float *out);

/* How one token is drawn. top_k: 0 for off; min_p: 0 for off, else a share of the largest probability; top_p: 1 for off;
 * uniform: in [0, 1). allowed: 0 for every token, else 1 + the line of `bits` that has a bit for each that may be drawn. */
typedef struct {
  double top_p, uniform;
  float temperature, min_p;
  int32_t top_k, allowed;
} StDraw;

/* logits [rows][vocab], finite or -inf -> tokens [rows]. Filters are thresholds: top_k keeps logits at or above the k-th
 * largest, min_p those with at least that share of the largest probability, top_p, over what those leave, the largest
 * until their share reaches it; ties at a threshold stay. The token is found by inverse CDF in the order of ids.
 * bits: lines of (vocab + 31) / 32, the lowest bit first; what is not allowed counts as -inf. NULL: there are none. */
void st_draw(int32_t rows, int32_t vocab, const float *logits, const StDraw *draws, const uint32_t *bits, int32_t *tokens);

/* The first of the largest logits of each row. */
void st_argmax(int32_t rows, int32_t vocab, const float *logits, int32_t *tokens);

/* Whether all of a row is finite: 1 or 0. */
void st_finite(int32_t rows, int32_t width, const float *x, uint8_t *is_finite);

/* Bytes that products and attention have read since the library was loaded: counts[scheme] of weights in ST_FLOAT32 ..
 * ST_INT4, counts[4 + type] of KV stores in ST_FLOAT32 .. ST_INT8. A call counts its weight once, however often the cache
 * must fetch it, and the keys and values, with their scales, that some query of a row sees. */
void st_bytes_read(int64_t counts[7]);

/* One decoder layer on hidden [T][hidden_size], in place, with what adapters add to it. */
void st_layer(const StLayer *layer, const StBatch *batch, const StKv *kv, int32_t adapters, const StAdapted *adapted,
              float *hidden);

/* The same of a layer with a gated delta net, whose products are the layer's `qkv`. */
void st_delta_layer(const StLayer *layer, const StDelta *net, const StStates *step, float *states, int32_t adapters,
                    const StAdapted *adapted, float *hidden);

/* Tell the system that these bytes, read from a file mapping, need not stay in memory (madvise DONTNEED, whole pages). */
void st_release_pages(const void *begin, int64_t bytes);

/* Anonymous memory on huge pages where the system has them (2 MiB aligned, zero); st_free gives it back. NULL: none left. */
void *st_allocate(int64_t bytes);
void st_free(void *begin, int64_t bytes);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
