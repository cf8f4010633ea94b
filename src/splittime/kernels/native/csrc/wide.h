// For the files that are compiled for any processor. A WIDE function exists in several versions, of which the library
// takes the best as it is loaded; where there is no way to do that, in one. All give the same bits: none of them
// adds a product that is rounded, which is all that a processor with more instructions would round otherwise. What a
// WIDE function calls in its loops is INLINE, so that it becomes part of each version.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif
#define INLINE inline __attribute__((always_inline))

typedef uint32_t Words __attribute__((vector_size(16)));

// [16 rows][words] -> [words][16], four by four.
INLINE void transpose(const uint32_t *rows, int64_t row_stride, int64_t words, uint32_t *to) {
  constexpr int ROWS = 16;
  int64_t k = 0;
  for (; k + 4 <= words; k += 4)
    for (int r = 0; r < ROWS; r += 4) {
      Words v[4];
      for (int i = 0; i < 4; i++) memcpy(&v[i], rows + (r + i) * row_stride + k, sizeof v[i]);
      for (int i = 0; i < 4; i++) {
        const Words out = {v[0][i], v[1][i], v[2][i], v[3][i]};
        memcpy(to + (k + i) * ROWS + r, &out, sizeof out);
      }
    }
  for (; k < words; k++)
    for (int r = 0; r < ROWS; r++) to[k * ROWS + r] = rows[r * row_stride + k];
}
