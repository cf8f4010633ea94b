// The machine's own limits, measured: for each line on standard input, one line of JSON on standard output.
//   read_gb_per_s      streaming read of 1 GiB by all threads together, best of 5 passes
//   fma_gflop_per_s    float32 multiply-add on registers (2 operations each), all threads
//   int8_gop_per_s     8-bit products summed to 32 bits (2 operations each): the best of the mixes that the compiler's
//                      target has: VNNI (vpdpbusd), or vpmaddubsw + vpmaddwd, or vpmaddwd on 16-bit values
// The memory stays allocated between probes, so that the first touch is paid once.
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MAX_THREADS = 64, CHAINS = 12 };
static const size_t TOTAL_BYTES = (size_t)1 << 30;

typedef struct {
  const char *bytes;
  size_t size;
  int kind;
  long rounds;
  double sink;
} Task;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double read_all(const char *bytes, size_t size) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i + 128 <= size; i += 128) {
    a = _mm256_add_epi64(a, _mm256_load_si256((const __m256i *)(bytes + i)));
    b = _mm256_add_epi64(b, _mm256_load_si256((const __m256i *)(bytes + i + 32)));
    c = _mm256_add_epi64(c, _mm256_load_si256((const __m256i *)(bytes + i + 64)));
    d = _mm256_add_epi64(d, _mm256_load_si256((const __m256i *)(bytes + i + 96)));
  }
  a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
  return (double)_mm256_extract_epi64(a, 0);
}

// The compiler must not see that the factors never change: it would fold the loop.
#define HIDE(x) __asm__ volatile("" : "+x"(x))

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDTH 64
typedef __m512 Floats;
typedef __m512i Ints;
#define ONES_F _mm512_set1_ps(0.5f)
#define SET1_8(v) _mm512_set1_epi8(v)
#define SET1_16(v) _mm512_set1_epi16(v)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define ADD32(a, b) _mm512_add_epi32(a, b)
#define MADD16(a, b) _mm512_madd_epi16(a, b)
#define MADD8(a, b) _mm512_maddubs_epi16(a, b)
#else
#define WIDTH 32
typedef __m256 Floats;
typedef __m256i Ints;
#define ONES_F _mm256_set1_ps(0.5f)
#define SET1_8(v) _mm256_set1_epi8(v)
#define SET1_16(v) _mm256_set1_epi16(v)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define ADD32(a, b) _mm256_add_epi32(a, b)
#define MADD16(a, b) _mm256_madd_epi16(a, b)
#define MADD8(a, b) _mm256_maddubs_epi16(a, b)
#endif
#if defined(__AVX512VNNI__) && WIDTH == 64
#define DOT8(acc, a, b) _mm512_dpbusd_epi32(acc, a, b)
#elif defined(__AVXVNNI__)
#define DOT8(acc, a, b) _mm256_dpbusd_avx_epi32(acc, a, b)
#endif

// Twelve sums in as many registers: enough to hide the latency of a multiply-add at two a cycle.
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define CHAIN_LOOP(TYPE, START, DO)                                              \
  TYPE s0 = START, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0; \
  TYPE s8 = s0, s9 = s0, s10 = s0, s11 = s0;                                     \
  for (long r = 0; r < rounds; r++) {                                            \
    EACH(DO)                                                                     \
  }                                                                              \
  return 0;

static double fma_loop(long rounds) {
  Floats x = ONES_F;
  HIDE(x);
#define DO(i) s##i = FMA(s##i, x, x); HIDE(s##i);
  CHAIN_LOOP(Floats, x, DO)
#undef DO
}
static double madd16_loop(long rounds) {
  Ints x = SET1_16(3), y = SET1_16(5);
  HIDE(x); HIDE(y);
#define DO(i) { Ints p = MADD16(x, y); HIDE(p); s##i = ADD32(s##i, p); HIDE(s##i); }
  CHAIN_LOOP(Ints, x, DO)
#undef DO
}
static double madd8_loop(long rounds) {
  Ints x = SET1_8(3), y = SET1_8(5), one = SET1_16(1);
  HIDE(x); HIDE(y); HIDE(one);
#define DO(i) { Ints p = MADD8(x, y); HIDE(p); p = MADD16(p, one); HIDE(p); s##i = ADD32(s##i, p); HIDE(s##i); }
  CHAIN_LOOP(Ints, x, DO)
#undef DO
}
#ifdef DOT8
static double dot8_loop(long rounds) {
  Ints x = SET1_8(3), y = SET1_8(5);
  HIDE(x); HIDE(y);
#define DO(i) s##i = DOT8(s##i, x, y); HIDE(s##i);
  CHAIN_LOOP(Ints, x, DO)
#undef DO
}
#endif

static void *work(void *given) {
  Task *task = given;
  if (task->kind == 0) task->sink = read_all(task->bytes, task->size);
  if (task->kind == 1) task->sink = fma_loop(task->rounds);
  if (task->kind == 2) task->sink = madd16_loop(task->rounds);
  if (task->kind == 3) task->sink = madd8_loop(task->rounds);
#ifdef DOT8
  if (task->kind == 4) task->sink = dot8_loop(task->rounds);
#endif
  return NULL;
}

// Seconds that all threads together take for a task each; `passes` times, the best.
static double timed(int kind, char *memory, int threads, long rounds, int passes) {
  double best = 1e30;
  for (int pass = 0; pass < passes; pass++) {
    pthread_t ids[MAX_THREADS];
    Task tasks[MAX_THREADS];
    size_t share = TOTAL_BYTES / (size_t)threads / 4096 * 4096;
    double begin = now_s();
    for (int i = 0; i < threads; i++) {
      tasks[i] = (Task){memory + share * (size_t)i, share, kind, rounds, 0};
      pthread_create(&ids[i], NULL, work, &tasks[i]);
    }
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    double taken = now_s() - begin;
    if (taken < best) best = taken;
  }
  return best;
}

int main(int count, char **arguments) {
  int threads = count > 1 ? atoi(arguments[1]) : 2;
  if (threads < 1 || threads > MAX_THREADS) return 2;
  char *memory = mmap(NULL, TOTAL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, TOTAL_BYTES, MADV_HUGEPAGE);
  memset(memory, 1, TOTAL_BYTES);
  const long rounds = 4000000;
  const double giga = (double)rounds * CHAINS * threads / 1e9;  // instructions, in thousands of millions
  char line[256];
  while (fgets(line, sizeof line, stdin)) {
    double read = (double)TOTAL_BYTES / timed(0, memory, threads, 0, 5) / 1e9;
    double fma = giga * (WIDTH / 4) * 2 / timed(1, memory, threads, rounds, 5);
    double best = giga * (WIDTH / 2) * 2 / timed(2, memory, threads, rounds, 5);
    double pair = giga * WIDTH * 2 / timed(3, memory, threads, rounds, 5);
    if (pair > best) best = pair;
#ifdef DOT8
    double dot = giga * WIDTH * 2 / timed(4, memory, threads, rounds, 5);
    if (dot > best) best = dot;
#endif
    printf("{\"read_gb_per_s\": %.2f, \"fma_gflop_per_s\": %.1f, \"int8_gop_per_s\": %.1f}\n", read, fma, best);
    fflush(stdout);
  }
  return 0;
}
