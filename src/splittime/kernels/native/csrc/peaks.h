/* What a processor can do at most: short loops of its fastest instructions, none of them a kernel of splittime's.
 * The server's ceilings (runner/ceilings.py) and the benchmark beside other engines (benchmarks/peers/machine.cpp)
 * measure by the same loops. All of it runs on the calling thread. Call st_peak_runs before anything else of a loop. */
#ifndef SPLITTIME_PEAKS_H
#define SPLITTIME_PEAKS_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* What is multiplied. Sums are float32 or 32-bit integers. */
enum { ST_PEAK_FLOAT32 = 0, ST_PEAK_BFLOAT16 = 1, ST_PEAK_INT8 = 2, ST_PEAK_READ = 3 };

/* The loops by number, from 0; NULL from the last on. */
const char *st_peak_name(int32_t loop);
int32_t st_peak_kind(int32_t loop);

/* 1 if this processor and system run it. A processor may advertise tiles and kill who uses them, so they are tried in a
 * child process, once. */
int32_t st_peak_runs(int32_t loop);

/* Products: so many rounds; returns the operations, where a multiplication and its addition are two. */
double st_peak_multiply(int32_t loop, int64_t rounds);

/* Takes these bytes out of every cache, whoever shares it, so that the next read is from memory; 0 if this processor has
 * no way to. Of 0 bytes: only says whether. */
int32_t st_peak_forget(const void *bytes, int64_t size);

/* Reading: all bytes once; size is a multiple of 1024. Returns something made of them. */
int64_t st_peak_read(int32_t loop, const void *bytes, int64_t size);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
