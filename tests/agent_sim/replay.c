/*
 * What a process asks the system for and gets differently each time, made the same: loaded before the C library (LD_PRELOAD) into a
 * process that tries one schedule, so that the seed decides everything.
 *
 * - Random numbers come from a generator that begins with HOLDFAST_REPLAY_SEED: the order of hash maps, UUIDs, jitter.
 * - The clocks begin at the same moments, and move by a microsecond with each look: the wall clock in 2026, the monotonic one far ahead of
 *   the kernel's, so that no wait of a thread for a moment of it ends by itself. Simulated time is tokio's, which stands still.
 * - Files are not watched: an event of inotify comes when the kernel likes. Who cannot watch lists periodically.
 *
 * Threads of blocking work are the agent's own matter (src/types/blocking.rs).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

static uint64_t state;
static int seeded;

/* splitmix64 */
static uint64_t next(void)
{
    if (!seeded) {
        const char *seed = getenv("HOLDFAST_REPLAY_SEED");
        state = seed ? strtoull(seed, NULL, 10) : 0;
        seeded = 1;
    }
    uint64_t z = __atomic_add_fetch(&state, 0x9e3779b97f4a7c15ULL, __ATOMIC_SEQ_CST);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

ssize_t getrandom(void *buffer, size_t length, unsigned int flags)
{
    unsigned char *bytes = buffer;
    (void)flags;
    for (size_t i = 0; i < length; i++)
        bytes[i] = (unsigned char)(next() >> 32);
    return (ssize_t)length;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    static uint64_t looks;
    time_t begin;
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
        begin = 1780000000;
        break;
    case CLOCK_MONOTONIC:
        begin = 1000000000;
        break;
    default:
        if (!real)
            real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
        return real(clock, now);
    }
    uint64_t look = __atomic_add_fetch(&looks, 1, __ATOMIC_SEQ_CST);
    now->tv_sec = begin + (time_t)(look / 1000000);
    now->tv_nsec = (long)(look % 1000000) * 1000;
    return 0;
}

int inotify_init1(int flags)
{
    (void)flags;
    errno = EMFILE;
    return -1;
}
