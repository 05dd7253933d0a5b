/* The cards that are not there, one or several alike: what each is said to be, and which process holds how
   much of its memory.

   The table of processes is a file that all of them map, so that each sees the others' memory, and a
   process that was killed holds nothing. Settings are read from the environment (card.py sets them). */

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace card {

constexpr size_t MIB = 1 << 20;
constexpr int MOST_PROCESSES = 512;
constexpr int MOST_CARDS = 16;

inline size_t number(const char *name, size_t otherwise) {
    const char *said = getenv(name);
    return said ? strtoull(said, nullptr, 10) : otherwise;
}

/* What CUDA calls total; NVML's total has what the driver keeps for itself besides. */
inline const size_t total_bytes = number("NO_CARD_TOTAL_BYTES", 0);
inline const size_t driver_bytes = number("NO_CARD_DRIVER_BYTES", 0);
/* Cards alike, numbered from 0. */
inline const int num_cards = (int)number("NO_CARD_COUNT", 1);
/* Of each process that uses CUDA, on each card that it uses. A figure that was put in: no card told it. */
inline const size_t context_bytes = number("NO_CARD_CONTEXT_BYTES", 0);
/* 90 is 9.0. */
inline const int capability = (int)number("NO_CARD_CAPABILITY", 80);
inline const int num_sms = (int)number("NO_CARD_NUM_SMS", 108);
inline const size_t l2_bytes = number("NO_CARD_L2_BYTES", 40u << 20);
/* Whether all of something is so: what Transformers asks of a mask. 1 or 0. */
inline const int all = (int)number("NO_CARD_ALL", 1);

inline const char *name() {
    const char *said = getenv("NO_CARD_NAME");
    return said ? said : "no card";
}

/* CUDA_VISIBLE_DEVICES hides it, as it hides real ones. */
inline bool is_hidden() {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible && (!*visible || *visible == '-');
}

/* It shows as many as it names, the first ones, whichever they are. */
inline int num_visible() {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return num_cards;
    int named = 1;
    for (; *visible; ++visible) named += *visible == ',';
    return named < num_cards ? named : num_cards;
}

struct Process {
    int pid;
    size_t bytes[MOST_CARDS];
};

inline Process *processes() {
    static Process *table = [] {
        const char *path = getenv("NO_CARD_STATE");
        int fd = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
        size_t size = sizeof(Process) * MOST_PROCESSES;
        if (fd < 0 || ftruncate(fd, (off_t)size)) {
            fputs("no card: NO_CARD_STATE must name a file that can be written\n", stderr);
            abort();
        }
        void *mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (mapped == MAP_FAILED) abort();
        return (Process *)mapped;
    }();
    return table;
}

/* A zombie's memory is free again. */
inline bool is_alive(int pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY);
    if (fd < 0) return false;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return false;
    text[size] = 0;
    const char *end = strrchr(text, ')');
    return end && end[2] != 'Z' && end[2] != 'X';
}

inline size_t used_bytes(int device) {
    size_t sum = 0;
    for (int i = 0; i < MOST_PROCESSES; i++) {
        Process &process = processes()[i];
        int pid = __atomic_load_n(&process.pid, __ATOMIC_SEQ_CST);
        if (pid && is_alive(pid)) sum += __atomic_load_n(&process.bytes[device], __ATOMIC_SEQ_CST);
    }
    return sum;
}

/* A row for this process, of one that is gone or of none. */
inline Process *enter() {
    for (int i = 0; i < MOST_PROCESSES; i++) {
        Process &process = processes()[i];
        int pid = __atomic_load_n(&process.pid, __ATOMIC_SEQ_CST);
        if (pid && is_alive(pid)) continue;
        if (__atomic_compare_exchange_n(
                &process.pid, &pid, getpid(), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            for (size_t &bytes : process.bytes) __atomic_store_n(&bytes, 0, __ATOMIC_SEQ_CST);
            return &process;
        }
    }
    fputs("no card: too many processes\n", stderr);
    abort();
}

}  // namespace card
