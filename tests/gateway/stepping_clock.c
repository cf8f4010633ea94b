/* Loaded before libc (LD_PRELOAD): the wall clock steps to and fro by an hour, ten times a second, as a machine's does
   when its time is set. The monotonic clock is left as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

static int ask(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, at);
}

static time_t step(void) {
    struct timespec at;
    ask(CLOCK_MONOTONIC, &at);
    return (at.tv_nsec / 100000000) % 2 ? 3600 : -3600;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = ask(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += step();
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
