/* Records what a process does to the files of one folder, in the order in which it was done.

   cc -shared -fPIC -o file_operations.so file_operations.c
   RECORD_OF=/folder RECORD_IN=/elsewhere/record LD_PRELOAD=./file_operations.so program

   A record is an operation (a letter), a file descriptor, a number (offset, size or flags; all 64-bit),
   the length of what follows, and that: the bytes that were written, or paths, each ended by a NUL.
   What is written to the standard output is recorded too, so that its place among the rest is known.
   Calls that fail are none. One process; mapped memory and what opens by other calls is not seen: compare
   the files as they are in the end with what their record makes of them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FILES 4096

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static char is_recorded[MOST_FILES];
static const char *folder;
static int record_fd = -1;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static void record(char operation, int fd, int64_t number, const void *data, size_t length) {
    int64_t head[4] = {operation, fd, number, (int64_t)length};
    struct iovec parts[2] = {{head, sizeof head}, {(void *)data, length}};
    if (writev(record_fd, parts, 2) != (ssize_t)(sizeof head + length)) abort();
}

static int is_ours(const char *path) {
    return record_fd >= 0 && !strncmp(path, folder, strlen(folder));
}

static int is_open(int fd) {
    return record_fd >= 0 && fd >= 0 && fd < MOST_FILES && is_recorded[fd];
}

__attribute__((constructor)) static void begin(void) {
    REAL(int, open, const char *, int, ...);
    const char *path = getenv("RECORD_IN");
    folder = getenv("RECORD_OF");
    if (!path || !folder) return;
    record_fd = fcntl(real(path, O_WRONLY | O_CREAT | O_APPEND, 0600), F_DUPFD_CLOEXEC, MOST_FILES / 8);
    if (record_fd < 0) abort();
    is_recorded[STDOUT_FILENO] = 1;
}

/* Around the operation itself, so that the order of records is that of the operations. */
#define RECORDED(type, call, is_wanted, write_record) \
    pthread_mutex_lock(&one_at_a_time); \
    type done = call; \
    if (done >= 0 && (is_wanted)) { write_record; } \
    pthread_mutex_unlock(&one_at_a_time); \
    return done

static void opened(int fd, const char *path, int flags) {
    if (fd >= MOST_FILES) abort();
    is_recorded[fd] = is_ours(path);
    if (is_recorded[fd]) record('o', fd, flags, path, strlen(path) + 1);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        RECORDED(int, real(path, flags, mode), record_fd >= 0, opened(done, path, flags)); \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    REAL(int, close, int);
    RECORDED(int, real(fd), is_open(fd), is_recorded[fd] = 0);
}

ssize_t write(int fd, const void *data, size_t length) {
    REAL(ssize_t, write, int, const void *, size_t);
    RECORDED(ssize_t, real(fd, data, length), is_open(fd),
        record('w', fd, fd == STDOUT_FILENO ? 0 : lseek(fd, 0, SEEK_CUR) - done, data, done));
}

#define PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t length, offset_type offset) { \
        REAL(ssize_t, name, int, const void *, size_t, offset_type); \
        RECORDED(ssize_t, real(fd, data, length, offset), is_open(fd), \
            record('w', fd, offset, data, done)); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define TRUNCATE(name, offset_type) \
    int name(int fd, offset_type size) { \
        REAL(int, name, int, offset_type); \
        RECORDED(int, real(fd, size), is_open(fd), record('t', fd, size, "", 0)); \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(name) \
    int name(int fd) { \
        REAL(int, name, int); \
        RECORDED(int, real(fd), is_open(fd), record('s', fd, 0, "", 0)); \
    }
SYNC(fsync)
SYNC(fdatasync)

int unlink(const char *path) {
    REAL(int, unlink, const char *);
    RECORDED(int, real(path), is_ours(path), record('u', -1, 0, path, strlen(path) + 1));
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    RECORDED(int, real(path, mode), is_ours(path), record('m', -1, 0, path, strlen(path) + 1));
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    char both[2 * 4096];
    size_t length = strlen(from) + 1, more = strlen(to) + 1;
    if (length + more > sizeof both) abort();
    memcpy(both, from, length);
    memcpy(both + length, to, more);
    RECORDED(int, real(from, to), is_ours(from) || is_ours(to), record('r', -1, 0, both, length + more));
}
