/* cuFile and hipFile without a GPU: direct reads of files into the memory of the simulated CUDA runtime, and everything that is
 * known to go wrong with the real libraries, on order.
 *
 * Types and codes follow the documented interface of cuFile 1.20; hipFile's numbers are laid out alike. What is to go wrong stands
 * in a file beside this library, "<library>.faults", a name and a value a line: a process that loads the library to try it out
 * has the same faults as its parent, and a copy of the library in another folder has others.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    DRIVER_NOT_INITIALIZED = 5001,
    CUDA_POINTER_INVALID = 5012,
    CUDA_POINTER_RANGE_ERROR = 5014,
    INVALID_FILE_TYPE = 5018,
    INVALID_FILE_OPEN_FLAG = 5019,
    INVALID_VALUE = 5022,
    MEMORY_ALREADY_REGISTERED = 5023,
    MEMORY_NOT_REGISTERED = 5024,
    HANDLE_NOT_REGISTERED = 5027,
    HANDLE_ALREADY_REGISTERED = 5028,
};

typedef struct {
    int code, cuda_code;
} status_t;

typedef struct {
    int type; /* 1: a descriptor */
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
} description_t;

enum { OPAQUE_FD = 1, HANDLE_MARK = 0x46494c45, MAX_HANDLES = 4096 };

struct handle {
    int mark, fd;
    char path[4096];
};

struct buffer {
    uintptr_t start;
    size_t nbytes;
};

/* The library's own counts, also those that cuFile would not give: order and size are those of Counts in cufile.py. */
static struct {
    uint64_t opens, handles, buffers, reads, read_nbytes, p2p_reads, nvfs_reads, posix_reads, unaligned_reads, failed_reads, violations;
} counts;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles[MAX_HANDLES];
static struct buffer buffers[MAX_HANDLES];
static bool is_open;
static int stats_level;
static char violations[16384];

static status_t answer(int code) { return (status_t){code, 0}; }

static void violate(const char *text) {
    counts.violations++;
    size_t length = strlen(violations);
    snprintf(violations + length, sizeof violations - length, "%s\n", text);
}

/* Faults -------------------------------------------------------------------------------------------------------------------- */

static const char *beside_library(const char *suffix, char *path, size_t room) {
    Dl_info found;
    if (!dladdr((void *)beside_library, &found)) return NULL;
    snprintf(path, room, "%s%s", found.dli_fname, suffix);
    return path;
}

/* The value of a fault as text; false where it is not set. Read anew each time: tests change it between calls. */
static bool fault_text(const char *name, char *value, size_t room) {
    char path[4200], line[4400];
    FILE *file = beside_library(".faults", path, sizeof path) ? fopen(path, "re") : NULL;
    bool is_set = false;
    while (file && fgets(line, sizeof line, file)) {
        char *space = strchr(line, ' ');
        if (!space || (size_t)(space - line) != strlen(name) || strncmp(line, name, space - line)) continue;
        space[strcspn(space, "\n")] = 0;
        snprintf(value, room, "%s", space + 1);
        is_set = true;
    }
    if (file) fclose(file);
    return is_set;
}

static long fault(const char *name) {
    char value[64];
    return fault_text(name, value, sizeof value) ? strtol(value, NULL, 10) : 0;
}

/* Faults of files can be limited to those under a path. */
static long fault_of_file(const char *name, const struct handle *handle) {
    char under[4096];
    if (fault_text("only_under", under, sizeof under) && strncmp(handle->path, under, strlen(under))) return 0;
    return fault(name);
}

static void hang(void) {
    for (;;) pause();
}

/* Device memory: of the simulated CUDA runtime that this process has loaded --------------------------------------------------- */

/* Where to write for a device pointer. NULL and a code where it leads nowhere; host memory is written where it is, as cuFile does. */
static char *destination_of(uintptr_t pointer, size_t nbytes, int *code) {
    char path[4096];
    int (*view)(uintptr_t, size_t, int, void **) = NULL;
    int (*is_device)(uintptr_t) = NULL;
    void *runtime = fault_text("runtime", path, sizeof path) ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (runtime) {
        *(void **)&view = dlsym(runtime, "sim_view");
        *(void **)&is_device = dlsym(runtime, "sim_is_device_memory");
        dlclose(runtime);
    }
    void *found;
    *code = SUCCESS;
    if (view && !view(pointer, nbytes, true, &found)) return found;
    if (is_device && is_device(pointer)) return *code = CUDA_POINTER_RANGE_ERROR, NULL;
    if (!pointer) return *code = CUDA_POINTER_INVALID, NULL;
    return (char *)pointer;
}

/* The interface ------------------------------------------------------------------------------------------------------------- */

EXPORT status_t cuFileDriverOpen(void) {
    if (fault("open_closes_stdin")) close(0);
    if (fault("open_hangs")) hang();
    int code = fault("open_error");
    pthread_mutex_lock(&lock);
    if (!code) is_open = true;
    counts.opens++;
    pthread_mutex_unlock(&lock);
    return answer(code);
}

EXPORT status_t cuFileDriverClose(void) {
    pthread_mutex_lock(&lock);
    int code = is_open ? SUCCESS : DRIVER_NOT_INITIALIZED;
    if (is_open && (counts.handles || counts.buffers)) violate("the driver is closed while files or buffers are registered");
    is_open = false;
    pthread_mutex_unlock(&lock);
    return answer(code);
}

EXPORT status_t cuFileDriverClose_v2(void) { return cuFileDriverClose(); }

EXPORT status_t cuFileGetVersion(int *version) {
    *version = 1200;
    return answer(SUCCESS);
}

static int check_descriptor(int fd) {
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0) return INVALID_FILE_TYPE;
    if (flags & O_NOFOLLOW) return INVALID_FILE_OPEN_FLAG; /* seen with libcufile 1.20 */
    for (int index = 0; index < MAX_HANDLES; index++)
        if (handles[index] && handles[index]->fd == fd) return HANDLE_ALREADY_REGISTERED;
    return SUCCESS;
}

static struct handle *make_handle(int fd) {
    struct handle *handle = calloc(1, sizeof *handle);
    if (!handle) abort();
    char link[64];
    handle->mark = HANDLE_MARK;
    handle->fd = fd;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, handle->path, sizeof handle->path - 1) < 0) handle->path[0] = 0;
    return handle;
}

static int register_handle(void **made, const description_t *description) {
    if (!made || !description) return INVALID_VALUE;
    if (!is_open) return DRIVER_NOT_INITIALIZED;
    if (description->type != OPAQUE_FD) return INVALID_FILE_TYPE;
    int code = check_descriptor(description->handle.fd);
    if (code) return code;
    struct handle *handle = make_handle(description->handle.fd);
    code = fault_of_file("register_error", handle);
    for (int index = 0; !code && index < MAX_HANDLES; index++) {
        if (handles[index]) continue;
        *made = handles[index] = handle;
        counts.handles++;
        return SUCCESS;
    }
    free(handle);
    return code ? code : INVALID_VALUE;
}

EXPORT status_t cuFileHandleRegister(void **made, description_t *description) {
    pthread_mutex_lock(&lock);
    int code = register_handle(made, description);
    pthread_mutex_unlock(&lock);
    return answer(code);
}

EXPORT void cuFileHandleDeregister(void *handle) {
    pthread_mutex_lock(&lock);
    bool is_known = false;
    for (int index = 0; index < MAX_HANDLES; index++) {
        if (!handle || handles[index] != handle) continue;
        if (fcntl(handles[index]->fd, F_GETFD) < 0) violate("a descriptor is closed before its handle is deregistered");
        handles[index]->mark = 0; /* never freed: using it afterwards must be noticed */
        handles[index] = NULL;
        counts.handles--;
        is_known = true;
    }
    if (!is_known) violate("a handle is deregistered that is not registered");
    pthread_mutex_unlock(&lock);
}

EXPORT status_t cuFileBufRegister(const void *start, size_t nbytes, int flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int code = !is_open ? DRIVER_NOT_INITIALIZED : !start || !nbytes ? INVALID_VALUE : (int)fault("buffer_error");
    int free_at = -1;
    for (int index = 0; index < MAX_HANDLES; index++) {
        if (!code && buffers[index].nbytes && buffers[index].start == (uintptr_t)start) code = MEMORY_ALREADY_REGISTERED;
        if (!buffers[index].nbytes) free_at = index;
    }
    if (!code && free_at >= 0) {
        buffers[free_at] = (struct buffer){(uintptr_t)start, nbytes};
        counts.buffers++;
    }
    pthread_mutex_unlock(&lock);
    return answer(code);
}

EXPORT status_t cuFileBufDeregister(const void *start) {
    int code = MEMORY_NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (int index = 0; index < MAX_HANDLES; index++) {
        if (!buffers[index].nbytes || buffers[index].start != (uintptr_t)start) continue;
        buffers[index].nbytes = 0;
        counts.buffers--;
        code = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return answer(code);
}

static void count_read(bool is_aligned, ssize_t nbytes) {
    char route[16] = "p2p";
    fault_text("route", route, sizeof route);
    if (nbytes < 0) {
        counts.failed_reads++;
        return;
    }
    counts.read_nbytes += nbytes;
    counts.unaligned_reads += !is_aligned;
    if (!is_aligned || !strcmp(route, "posix")) counts.posix_reads++;
    else if (!strcmp(route, "nvfs")) counts.nvfs_reads++;
    else counts.p2p_reads++;
}

/* Faults of reads begin after `read_after` reads that pass. */
static long read_fault(const char *name, const struct handle *handle, uint64_t number) {
    return (long)number > fault("read_after") ? fault_of_file(name, handle) : 0;
}

static ssize_t read_file(struct handle *handle, uintptr_t base, size_t nbytes, off_t offset, off_t base_offset, uint64_t number) {
    int code;
    char *destination = destination_of(base + base_offset, nbytes, &code);
    if (code) return -code;
    if (read_fault("read_hangs", handle, number)) hang();
    if ((code = read_fault("read_error", handle, number))) return -code;
    if ((code = read_fault("read_errno", handle, number))) return errno = code, -1;
    long most = read_fault("read_at_most", handle, number);
    if (most && nbytes > (size_t)most) nbytes = most;
    size_t done = 0;
    while (done < nbytes) {
        ssize_t count = pread(handle->fd, destination + done, nbytes - done, offset + done);
        if (count < 0) return -1;
        if (!count) break; /* the end of the file */
        done += count;
    }
    if (done && read_fault("wrong_bytes", handle, number)) destination[done / 2] ^= 0x5A;
    return done;
}

EXPORT ssize_t cuFileRead(void *handle, void *base, size_t nbytes, off_t offset, off_t base_offset) {
    struct handle *known = handle;
    pthread_mutex_lock(&lock);
    uint64_t number = ++counts.reads;
    bool is_usable = is_open && known && known->mark == HANDLE_MARK;
    if (is_open && known && known->mark != HANDLE_MARK) violate("a file is read through a handle that was deregistered");
    pthread_mutex_unlock(&lock);
    if (!is_usable) return -(is_open ? HANDLE_NOT_REGISTERED : DRIVER_NOT_INITIALIZED);
    ssize_t found = read_file(known, (uintptr_t)base, nbytes, offset, base_offset, number);
    int reason = errno;
    bool is_aligned = !((nbytes | (uintptr_t)offset | ((uintptr_t)base + base_offset)) & 4095);
    pthread_mutex_lock(&lock);
    count_read(is_aligned, found);
    pthread_mutex_unlock(&lock);
    errno = reason;
    return found;
}

/* Statistics: level 3 of cuFile 1.20, of which only the reads of the first GPU are filled in ---------------------------------- */

struct gpu_stats {
    char uuid[16];
    uint64_t read_nbytes, read_rate, read_utilization, read_duration_us;
    uint64_t total_reads, p2p_reads, nvfs_reads, posix_reads, unaligned_reads, routed_reads, sparse_regions, inline_regions, failed_reads;
    uint64_t writes[11], mappings[4], registered_nbytes;
};

struct stats_level_3 {
    uint64_t level_1[64], level_2[64];
    uint32_t gpu_count;
    struct gpu_stats gpus[16];
};

_Static_assert(sizeof(struct gpu_stats) == 16 + 29 * 8, "29 counters follow the identity of a GPU");

EXPORT status_t cuFileSetStatsLevel(int level) {
    int code = fault("stats_error");
    if (!code && (level < 0 || level > 3)) code = INVALID_VALUE;
    if (!code) stats_level = level;
    return answer(code);
}

EXPORT status_t cuFileGetStatsLevel(int *level) {
    *level = stats_level;
    return answer(SUCCESS);
}

EXPORT status_t cuFileStatsStart(void) { return answer(fault("stats_error")); }
EXPORT status_t cuFileStatsStop(void) { return answer(fault("stats_error")); }
EXPORT status_t cuFileStatsReset(void) { return answer(fault("stats_error")); }

EXPORT status_t cuFileGetStatsL3(struct stats_level_3 *found) {
    int code = fault("stats_error");
    if (!code && stats_level < 3) code = INVALID_VALUE;
    if (code) return answer(code);
    memset(found, 0, sizeof *found);
    pthread_mutex_lock(&lock);
    found->gpu_count = 1;
    found->gpus[0] = (struct gpu_stats){
        .read_nbytes = counts.read_nbytes,
        .total_reads = counts.reads,
        .p2p_reads = counts.p2p_reads,
        .nvfs_reads = counts.nvfs_reads,
        .posix_reads = counts.posix_reads,
        .unaligned_reads = counts.unaligned_reads,
        .failed_reads = counts.failed_reads,
    };
    pthread_mutex_unlock(&lock);
    return answer(SUCCESS);
}

/* What tests ask ------------------------------------------------------------------------------------------------------------ */

EXPORT void simfile_counts(void *found) {
    pthread_mutex_lock(&lock);
    memcpy(found, &counts, sizeof counts);
    pthread_mutex_unlock(&lock);
}

EXPORT const char *simfile_violations(void) { return violations; }

/* HIP's names --------------------------------------------------------------------------------------------------------------- */

EXPORT status_t hipFileDriverOpen(void) { return cuFileDriverOpen(); }
EXPORT status_t hipFileDriverClose(void) { return cuFileDriverClose(); }
EXPORT status_t hipFileHandleRegister(void **made, description_t *description) { return cuFileHandleRegister(made, description); }
EXPORT void hipFileHandleDeregister(void *handle) { cuFileHandleDeregister(handle); }
EXPORT status_t hipFileBufRegister(const void *start, size_t nbytes, int flags) { return cuFileBufRegister(start, nbytes, flags); }
EXPORT status_t hipFileBufDeregister(const void *start) { return cuFileBufDeregister(start); }
EXPORT ssize_t hipFileRead(void *handle, void *base, size_t nbytes, off_t offset, off_t base_offset) {
    return cuFileRead(handle, base, nbytes, offset, base_offset);
}
EXPORT status_t hipFileSetStatsLevel(int level) { return cuFileSetStatsLevel(level); }
EXPORT status_t hipFileGetStatsLevel(int *level) { return cuFileGetStatsLevel(level); }
EXPORT status_t hipFileStatsStart(void) { return cuFileStatsStart(); }
EXPORT status_t hipFileStatsStop(void) { return cuFileStatsStop(); }
EXPORT status_t hipFileStatsReset(void) { return cuFileStatsReset(); }
EXPORT status_t hipFileGetStatsL3(struct stats_level_3 *found) { return cuFileGetStatsL3(found); }
EXPORT status_t hipFileGetVersion(unsigned *major, unsigned *minor, unsigned *patch) {
    if (major) *major = 0;
    if (minor) *minor = 4;
    if (patch) *patch = 0;
    return answer(SUCCESS);
}
