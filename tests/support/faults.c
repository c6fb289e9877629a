/* Preloaded into a process: lets the n-th operation on files under one folder fail, once, and writes down how much of
   a file was synced. Nothing happens until one of the two functions at the end is called. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096], operation[16];
static int countdown, log_file = -1;

static int is_ours(int file) {
    char name[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, folder, strlen(folder));
}

static int fails(const char *what, int file, int problem) {
    if (countdown <= 0 || strcmp(what, operation) || !is_ours(file) || --countdown) return 0;
    errno = problem;
    return 1;
}

static void synced(int file) {
    struct stat found;
    char line[32];
    if (log_file < 0 || !is_ours(file) || fstat(file, &found) || !S_ISREG(found.st_mode)) return;
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
    real(log_file, line, snprintf(line, sizeof line, "%20lld", (long long)found.st_size), 0);
}

#define NEXT(name, ...) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)

ssize_t write(int file, const void *data, size_t size) {
    return fails("write", file, ENOSPC) ? -1 : NEXT(write, file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return fails("write", file, ENOSPC) ? -1 : NEXT(pwrite, file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return fails("write", file, ENOSPC) ? -1 : NEXT(pwrite64, file, data, size, at);
}
int ftruncate(int file, off_t size) {
    return fails("truncate", file, EIO) ? -1 : NEXT(ftruncate, file, size);
}
int ftruncate64(int file, off64_t size) {
    return fails("truncate", file, EIO) ? -1 : NEXT(ftruncate64, file, size);
}
int fsync(int file) {
    int done = fails("sync", file, EIO) ? -1 : NEXT(fsync, file);
    if (!done) synced(file);
    return done;
}
int fdatasync(int file) {
    int done = fails("sync", file, EIO) ? -1 : NEXT(fdatasync, file);
    if (!done) synced(file);
    return done;
}

void faults_arm(const char *under, const char *what, int n) {
    snprintf(folder, sizeof folder, "%s", under);
    snprintf(operation, sizeof operation, "%s", what);
    countdown = n;
}
int faults_left(void) { return countdown; }
void faults_watch(const char *under, int file) {
    snprintf(folder, sizeof folder, "%s", under);
    log_file = file;
}
