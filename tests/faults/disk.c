// Stands between a process and its disk (LD_PRELOAD): writes down what it asks of the disk, in order, and refuses
// to write or to sync where it is told to. See disk.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char home[PATH_MAX];
static int trace = -1;
enum { SYNCS, WRITES };
static long counts[2], refuse_from, refuse_until;
static int refuse_what, refuse_with;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DISK_TRACE"), *under = getenv("DISK_HOME");
    if (under) snprintf(home, sizeof home, "%s", under);
    if (path) trace = REAL(open)(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
}

// From now on the syncs, or writes, of number ``from`` up to ``until`` fail; the next one has number 1.
void disk_refuse(int what, long from, long until, int code) {
    pthread_mutex_lock(&mutex);
    counts[SYNCS] = counts[WRITES] = 0;
    refuse_what = what, refuse_from = from, refuse_until = until, refuse_with = code;
    pthread_mutex_unlock(&mutex);
}

long disk_count(int what) { return counts[what]; }

static int is_refused(int what) {
    counts[what]++;
    return refuse_what == what && counts[what] >= refuse_from && counts[what] < refuse_until;
}

static int is_ours(const char *path) {
    return home[0] && strncmp(path, home, strlen(home)) == 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return is_ours(path);
}

static void record(char what, uint64_t file, uint64_t offset, const char *path, const void *data, uint64_t size) {
    if (trace < 0) return;
    struct __attribute__((packed)) { char what; uint64_t file, offset; uint32_t path; uint64_t size; } head = {
        what, file, offset, (uint32_t)strlen(path), size};
    __typeof__(&write) put = REAL(write);
    if (put(trace, &head, sizeof head) != sizeof head || put(trace, path, head.path) != (ssize_t)head.path) abort();
    for (uint64_t done = 0; done < size;) {
        ssize_t n = put(trace, (const char *)data + done, size - done);
        if (n <= 0) abort();
        done += n;
    }
}

// What the process wants to have in the trace itself, at this place.
void disk_mark(const char *text, uint64_t size) {
    pthread_mutex_lock(&mutex);
    record('m', 0, 0, "", text, size);
    pthread_mutex_unlock(&mutex);
}

static uint64_t number_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static int opened(__typeof__(&open) real, const char *path, int flags, mode_t mode) {
    pthread_mutex_lock(&mutex);
    int is_new = (flags & O_CREAT) && access(path, F_OK), fd = real(path, flags, mode), error = errno;
    if (fd >= 0 && is_ours(path)) {
        if (is_new) record('c', number_of(fd), 0, path, "", 0);
        else if (flags & O_TRUNC) record('t', number_of(fd), 0, path, "", 0);
    }
    pthread_mutex_unlock(&mutex);
    errno = error;
    return fd;
}

#define MODE(flags) mode_t mode = 0; if ((flags) & O_CREAT) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *path, int flags, ...) { MODE(flags) return opened(REAL(open), path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(REAL(open64), path, flags, mode); }

static ssize_t written(int fd, const void *data, ssize_t n, uint64_t offset) {
    char path[PATH_MAX];
    if (n > 0 && path_of(fd, path)) record('w', number_of(fd), offset, path, data, n);
    return n;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (fd == trace || !home[0]) return REAL(write)(fd, data, size);
    pthread_mutex_lock(&mutex);
    char path[PATH_MAX];
    off_t at = lseek(fd, 0, SEEK_CUR);
    int refused = at >= 0 && path_of(fd, path) && is_refused(WRITES);
    ssize_t n = REAL(write)(fd, data, refused ? size / 2 : size);  // of what is refused half is there
    int error = refused ? refuse_with : errno;
    if (at >= 0) written(fd, data, n, at);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return refused ? -1 : n;
}

static ssize_t put_at(__typeof__(&pwrite) real, int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    pthread_mutex_lock(&mutex);
    int refused = path_of(fd, path) && is_refused(WRITES);
    ssize_t n = real(fd, data, refused ? size / 2 : size, offset);
    int error = refused ? refuse_with : errno;
    written(fd, data, n, offset);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return refused ? -1 : n;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return put_at(REAL(pwrite), fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return put_at(REAL(pwrite64), fd, data, size, at); }

static int cut(__typeof__(&ftruncate) real, int fd, off_t size) {
    char path[PATH_MAX];
    pthread_mutex_lock(&mutex);
    int failed = real(fd, size), error = errno;
    if (!failed && path_of(fd, path)) record('t', number_of(fd), size, path, "", 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}
int ftruncate(int fd, off_t size) { return cut(REAL(ftruncate), fd, size); }
int ftruncate64(int fd, off_t size) { return cut(REAL(ftruncate64), fd, size); }

static int synced(__typeof__(&fsync) real, int fd) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd);
    pthread_mutex_lock(&mutex);
    int refused = is_refused(SYNCS), failed = refused ? -1 : real(fd), error = refused ? refuse_with : errno;
    if (!failed) record('s', number_of(fd), 0, path, "", 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}
int fsync(int fd) { return synced(REAL(fsync), fd); }
int fdatasync(int fd) { return synced(REAL(fdatasync), fd); }

static int named(char what, int failed, const char *from, const char *to) {
    int error = errno;
    if (!failed && (is_ours(from) || is_ours(to))) record(what, 0, 0, from, to, strlen(to));
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}
int link(const char *from, const char *to) {
    pthread_mutex_lock(&mutex);
    return named('l', REAL(link)(from, to), from, to);
}
int rename(const char *from, const char *to) {
    pthread_mutex_lock(&mutex);
    return named('r', REAL(rename)(from, to), from, to);
}
int unlink(const char *path) {
    pthread_mutex_lock(&mutex);
    return named('u', REAL(unlink)(path), path, "");
}
