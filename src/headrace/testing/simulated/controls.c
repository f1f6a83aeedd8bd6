/* What tests set and ask: limits, faults, counters, violations. Bound by __init__.py; no part of CUDA. */
#define _GNU_SOURCE
#include "simulation.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
unsigned generation = 1; /* rises with each reset: handles and threads of an earlier one are recognised */
bool has_driver = true;
struct device devices[MAX_DEVICES];
int device_count = 1;
struct stats stats;

static char *violation_text;
static size_t violation_length, violation_room;
static struct copy_record *copies;
static size_t copy_count, copy_room;
static uint64_t calls[FUNCTION_COUNT];
static uint64_t random_state;

#define AS_NAME(name) #name,
static const char *const function_names[] = {FUNCTIONS(AS_NAME)};
#undef AS_NAME

uint64_t random_below(uint64_t bound) { /* splitmix64 */
    uint64_t mixed = random_state += 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    return (mixed ^ mixed >> 31) % bound;
}

void violate(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    stats.violations++;
    if (violation_length + length + 1 > violation_room) {
        violation_room = 2 * (violation_length + length + 1);
        violation_text = realloc(violation_text, violation_room);
        if (!violation_text) abort();
    }
    memcpy(violation_text + violation_length, line, length);
    violation_length += length;
    violation_text[violation_length] = 0;
}

void log_copy(const struct work *work, const struct CUstream_st *stream) {
    if (copy_count == copy_room) {
        copy_room = copy_room ? 2 * copy_room : 256;
        copies = realloc(copies, copy_room * sizeof *copies);
        if (!copies) abort();
    }
    copies[copy_count++] = (struct copy_record){work->nbytes, stream->number, work->direction, stream->device, work->pinned, 0};
    if (work->direction == cudaMemcpyHostToDevice) {
        stats.h2d_copies++;
        if (work->pinned) stats.h2d_pinned_nbytes += work->nbytes;
        else stats.h2d_pageable_nbytes += work->nbytes;
    } else if (work->direction == cudaMemcpyDeviceToDevice) {
        stats.d2d_copies++;
        stats.d2d_nbytes += work->nbytes;
    } else if (work->direction == cudaMemcpyDeviceToHost) {
        stats.d2h_copies++;
        stats.d2h_nbytes += work->nbytes;
    }
}

/* Faults -------------------------------------------------------------------------------------------------------------------- */

enum { WORK = FUNCTION_COUNT, FAULT_KINDS };

static struct fault {
    long after, times; /* calls that pass first; calls that fail then, -1 for all */
    cudaError_t error;
} faults[FAULT_KINDS];

static cudaError_t take_fault(int kind) {
    struct fault *fault = &faults[kind];
    if (!fault->times) return cudaSuccess;
    if (fault->after) return fault->after--, cudaSuccess;
    if (fault->times > 0) fault->times--;
    return fault->error;
}

cudaError_t injected(enum function function) {
    calls[function]++;
    if (!has_driver && function != CALL_cudaDriverGetVersion && function != CALL_cudaRuntimeGetVersion)
        return cudaErrorInsufficientDriver;
    return take_fault(function);
}

cudaError_t injected_into_work(void) { return take_fault(WORK); }

static int function_named(const char *name) {
    char translated[64];
    if (!strcmp(name, "work")) return WORK;
    if (!strcmp(name, "hipHostMalloc")) name = "cudaHostAlloc";
    if (!strcmp(name, "hipHostFree")) name = "cudaFreeHost";
    if (!strncmp(name, "hip", 3)) {
        snprintf(translated, sizeof translated, "cuda%s", name + 3);
        name = translated;
    }
    for (int function = 0; function < FUNCTION_COUNT; function++)
        if (!strcmp(name, function_names[function])) return function;
    return -1;
}

EXPORT int sim_fail(const char *name, long after, int error, long times) {
    int function = function_named(name);
    if (function < 0) return -1;
    pthread_mutex_lock(&lock);
    faults[function] = (struct fault){after, times, error};
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT int64_t sim_calls(const char *name) {
    int function = function_named(name);
    if (function < 0 || function == WORK) return -1;
    pthread_mutex_lock(&lock);
    int64_t count = calls[function];
    pthread_mutex_unlock(&lock);
    return count;
}

/* Settings ------------------------------------------------------------------------------------------------------------------ */

static void set_up_device(int index) {
    struct device *device = &devices[index];
    memset(device, 0, sizeof *device);
    device->total_nbytes = (size_t)64 << 30;
    for (int attribute = 0; attribute < ATTRIBUTE_COUNT; attribute++) device->attributes[attribute] = -1;
    device->attributes[cudaDevAttrCanMapHostMemory] = 1;
    device->attributes[cudaDevAttrPciBusId] = 0x10 + index;
    device->attributes[cudaDevAttrPciDeviceId] = 0;
    device->attributes[cudaDevAttrPciDomainId] = 0;
    device->attributes[cudaDevAttrAsyncEngineCount] = 3;
    device->attributes[cudaDevAttrUnifiedAddressing] = 1;
    device->attributes[cudaDevAttrComputeCapabilityMajor] = 9;
    device->attributes[cudaDevAttrComputeCapabilityMinor] = 0;
    device->attributes[cudaDevAttrHostRegisterSupported] = 1;
    device->attributes[cudaDevAttrPageableMemoryAccessUsesHostPageTables] = 0;
    device->attributes[cudaDevAttrHostRegisterReadOnlySupported] = 0; /* as reported of a B300 */
    device->attributes[cudaDevAttrGPUDirectRDMASupported] = 1;
}

__attribute__((constructor)) static void set_up(void) {
    for (int index = 0; index < MAX_DEVICES; index++) set_up_device(index);
    pinned_limit = SIZE_MAX;
    registration_limit = ((size_t)512 << 30) - 1; /* the cap of one call in drivers since r580, as reported */
}

EXPORT void sim_reset(int count, uint64_t seed) {
    pthread_mutex_lock(&lock);
    set_mode(MANUAL);
    forget_streams();
    forget_memory();
    set_up();
    generation++;
    device_count = count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count;
    random_state = seed;
    has_driver = moves_bytes = true;
    latency_ns = jitter_ns = 0;
    bytes_per_ns = 0;
    patience = 64;
    memset(&stats, 0, sizeof stats);
    memset(calls, 0, sizeof calls);
    memset(faults, 0, sizeof faults);
    copy_count = violation_length = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_set_mode(int wanted, uint64_t latency, uint64_t jitter, double rate, unsigned polls) {
    pthread_mutex_lock(&lock);
    latency_ns = latency;
    jitter_ns = jitter;
    bytes_per_ns = rate;
    patience = polls ? polls : 1;
    set_mode(wanted);
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_set_limits(size_t pinned, size_t registration) {
    pthread_mutex_lock(&lock);
    pinned_limit = pinned;
    registration_limit = registration;
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_set_device_memory(int device, size_t nbytes) {
    pthread_mutex_lock(&lock);
    devices[device].total_nbytes = nbytes > devices[device].used_nbytes ? nbytes : devices[device].used_nbytes;
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_set_attribute(int device, int attribute, int value) {
    pthread_mutex_lock(&lock);
    devices[device].attributes[attribute] = value;
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_set_driver(int present) {
    pthread_mutex_lock(&lock);
    has_driver = present;
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_move_bytes(int wanted) {
    pthread_mutex_lock(&lock);
    moves_bytes = wanted;
    pthread_mutex_unlock(&lock);
}

EXPORT long sim_release(long count) {
    pthread_mutex_lock(&lock);
    long done = release_work(count);
    pthread_mutex_unlock(&lock);
    return done;
}

/* Questions ----------------------------------------------------------------------------------------------------------------- */

EXPORT void sim_stats(struct stats *found) {
    pthread_mutex_lock(&lock);
    *found = stats;
    pthread_mutex_unlock(&lock);
}

EXPORT size_t sim_copies(struct copy_record *found, size_t room) {
    pthread_mutex_lock(&lock);
    size_t count = copy_count;
    memcpy(found, copies, (count < room ? count : room) * sizeof *copies);
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT size_t sim_violations(char *found, size_t room) {
    pthread_mutex_lock(&lock);
    size_t length = violation_length;
    if (length && length < room) memcpy(found, violation_text, length + 1);
    pthread_mutex_unlock(&lock);
    return length;
}

EXPORT void sim_violate(const char *text) {
    pthread_mutex_lock(&lock);
    violate("%s", text);
    pthread_mutex_unlock(&lock);
}

EXPORT void sim_live(size_t *found) {
    pthread_mutex_lock(&lock);
    found[0] = count_ranges(REGISTERED);
    found[1] = count_ranges(HOST_ALLOCATED);
    found[2] = count_ranges(DEVICE_MEMORY);
    found[3] = count_streams();
    found[4] = count_events();
    pthread_mutex_unlock(&lock);
}

EXPORT unsigned sim_contexts(void) {
    unsigned found = 0;
    pthread_mutex_lock(&lock);
    for (int index = 0; index < device_count; index++) found |= (unsigned)devices[index].has_context << index;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Where the simulator keeps the bytes of device memory. `in_order` is for kernels, which run after what was queued before. */
EXPORT int sim_view(uintptr_t address, size_t nbytes, int in_order, void **found) {
    pthread_mutex_lock(&lock);
    size_t copy_nbytes;
    *found = shadow_of(address, nbytes);
    int answer = *found ? 0 : -1;
    if (*found && !in_order && is_queued_for(address, nbytes, &copy_nbytes)) {
        violate("%zu bytes of device memory are read while a copy of %zu bytes from or to them is queued", nbytes, copy_nbytes);
        answer = 1;
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

EXPORT int sim_is_device_memory(uintptr_t address) {
    pthread_mutex_lock(&lock);
    struct range *range = range_at(address);
    int answer = range && range->kind == DEVICE_MEMORY;
    pthread_mutex_unlock(&lock);
    return answer;
}

/* Opens device memory to the host, or closes it again. */
EXPORT int sim_expose(uintptr_t address, int is_open) {
    pthread_mutex_lock(&lock);
    struct range *range = range_at(address);
    int answer = -1;
    if (range && range->kind == DEVICE_MEMORY)
        answer = mprotect((void *)range->start, range->nbytes, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
    pthread_mutex_unlock(&lock);
    return answer;
}
