/* The functions of libcudart that headrace calls: names, argument order and error codes are CUDA's (cuda_runtime_api.h 13.0).
 *
 * Every function counts its calls, can be made to fail, and leaves its error as the calling thread's last error.
 */
#define _GNU_SOURCE
#include "simulation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread struct {
    unsigned generation;
    cudaError_t last_error;
    int device;
    bool has_chosen; /* cudaSetDevice was called in this thread */
} thread;

static void renew_thread(void) {
    if (thread.generation != generation) memset(&thread, 0, sizeof thread);
    thread.generation = generation;
}

int current_device(void) {
    renew_thread();
    return thread.device;
}

static cudaError_t begin(enum function function) {
    pthread_mutex_lock(&lock);
    renew_thread();
    return injected(function);
}

static cudaError_t end(cudaError_t error) {
    if (error && error != cudaErrorNotReady) thread.last_error = error; /* an answer, not a failure */
    pthread_mutex_unlock(&lock);
    return error;
}

/* The first call of a thread that never chose a device makes a context on device 0, where a process may have no business. */
void touch_device(const char *caller) {
    int device = current_device();
    if (devices[device].has_context) return;
    for (int other = 0; other < device_count; other++)
        if (!thread.has_chosen && devices[other].has_context)
            violate("%s in a thread that never called cudaSetDevice makes a context on device %d", caller, device);
    devices[device].has_context = true;
}

static cudaError_t begin_on_device(enum function function, const char *caller) {
    cudaError_t error = begin(function);
    if (!error) touch_device(caller);
    return error ? error : devices[current_device()].broken;
}

/* As above, with the caller's stream looked up. CUDA allows work on another device's stream; headrace sets the device first. */
static cudaError_t begin_on_stream(enum function function, const char *caller, cudaStream_t *stream) {
    cudaError_t error = begin_on_device(function, caller);
    if (!error) error = use_stream(stream);
    if (!error && (*stream)->device != current_device())
        violate("%s on a stream of device %d while device %d is current", caller, (*stream)->device, current_device());
    return error ? error : devices[(*stream)->device].broken;
}

#define BEGIN(function) begin(CALL_##function)
#define BEGIN_ON_DEVICE(function) begin_on_device(CALL_##function, #function)
#define BEGIN_ON_STREAM(function, stream) begin_on_stream(CALL_##function, #function, stream)

/* Errors -------------------------------------------------------------------------------------------------------------------- */

extern bool has_driver;

EXPORT cudaError_t cudaGetLastError(void) {
    pthread_mutex_lock(&lock);
    renew_thread();
    cudaError_t error = has_driver ? thread.last_error : cudaErrorInsufficientDriver; /* as the real one without a driver */
    thread.last_error = cudaSuccess;
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) {
    pthread_mutex_lock(&lock);
    renew_thread();
    cudaError_t error = has_driver ? thread.last_error : cudaErrorInsufficientDriver;
    pthread_mutex_unlock(&lock);
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    for (size_t index = 0; index < sizeof errors / sizeof *errors; index++)
        if (errors[index].error == error) return errors[index].text;
    return "unrecognized error code";
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t index = 0; index < sizeof errors / sizeof *errors; index++)
        if (errors[index].error == error) return errors[index].name;
    return "unrecognized error code";
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    cudaError_t error = BEGIN(cudaRuntimeGetVersion);
    if (!error) *version = 13000;
    return end(error);
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    cudaError_t error = BEGIN(cudaDriverGetVersion);
    if (!error) *version = has_driver ? 13000 : 0;
    return end(error);
}

/* Devices ------------------------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = BEGIN(cudaGetDeviceCount);
    if (!error && !device_count) error = cudaErrorNoDevice;
    if (!error) *count = device_count;
    return end(error);
}

static bool is_device(int device) { return device >= 0 && device < device_count; }

EXPORT cudaError_t cudaSetDevice(int device) {
    cudaError_t error = BEGIN(cudaSetDevice);
    if (!error && !is_device(device)) error = cudaErrorInvalidDevice;
    if (!error) {
        thread.device = device;
        thread.has_chosen = true;
        devices[device].has_context = true; /* since CUDA 12 the call itself makes the context */
    }
    return end(error);
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    cudaError_t error = BEGIN(cudaGetDevice);
    if (!error) *device = thread.device;
    return end(error);
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    cudaError_t error = BEGIN(cudaDeviceGetAttribute);
    if (!error && !is_device(device)) error = cudaErrorInvalidDevice;
    bool is_known = !error && value && (unsigned)attribute < ATTRIBUTE_COUNT && devices[device].attributes[attribute] != -1;
    if (!error && !is_known) error = cudaErrorInvalidValue;
    if (!error) *value = devices[device].attributes[attribute];
    return end(error);
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
    cudaError_t error = BEGIN(cudaDeviceGetPCIBusId);
    if (!error && !is_device(device)) error = cudaErrorInvalidDevice;
    if (!error && (!text || room < 13)) error = cudaErrorInvalidValue;
    if (!error) {
        const int *attributes = devices[device].attributes;
        snprintf(text, room, "%04X:%02X:%02X.0", attributes[cudaDevAttrPciDomainId], attributes[cudaDevAttrPciBusId],
                 attributes[cudaDevAttrPciDeviceId]);
    }
    return end(error);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaMemGetInfo);
    const struct device *device = &devices[current_device()];
    if (!error) *free = device->total_nbytes - device->used_nbytes;
    if (!error) *total = device->total_nbytes;
    return end(error);
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaDeviceSynchronize);
    stats.waits++;
    if (!error) wait_for_device(current_device());
    return end(error ? error : devices[current_device()].broken);
}

/* Host memory --------------------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t nbytes, unsigned int flags) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaHostRegister);
    if (!error) error = register_memory((uintptr_t)pointer, nbytes, flags);
    return end(error);
}

/* Works on the books of a broken device too: what is given back is given back, whatever the call says. */
EXPORT cudaError_t cudaHostUnregister(void *pointer) {
    cudaError_t error = BEGIN(cudaHostUnregister);
    if (!error) touch_device("cudaHostUnregister");
    if (!error) error = unregister_memory((uintptr_t)pointer);
    return end(error ? error : devices[current_device()].broken);
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t nbytes, unsigned int flags) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaHostAlloc);
    if (!error) error = allocate_host(pointer, nbytes, flags);
    return end(error);
}

EXPORT cudaError_t cudaFreeHost(void *pointer) {
    cudaError_t error = BEGIN(cudaFreeHost);
    if (!error && pointer) error = free_host((uintptr_t)pointer);
    return end(error);
}

static struct range *host_range_at(void *pointer) {
    struct range *range = range_at((uintptr_t)pointer);
    return range && range->kind != DEVICE_MEMORY ? range : NULL;
}

EXPORT cudaError_t cudaHostGetFlags(unsigned int *flags, void *pointer) {
    cudaError_t error = BEGIN(cudaHostGetFlags);
    struct range *range = host_range_at(pointer);
    if (!error && !range) error = cudaErrorInvalidValue;
    if (!error) *flags = range->flags | cudaHostRegisterMapped; /* with unified addressing all of it is mapped */
    return end(error);
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned int flags) {
    (void)flags;
    cudaError_t error = BEGIN(cudaHostGetDevicePointer);
    if (!error && !host_range_at(pointer)) error = cudaErrorInvalidValue;
    if (!error) *device_pointer = pointer;
    return end(error);
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    cudaError_t error = BEGIN(cudaPointerGetAttributes);
    if (!error && !found) error = cudaErrorInvalidValue;
    if (error) return end(error);
    struct range *range = range_at((uintptr_t)pointer);
    bool is_device_memory = range && range->kind == DEVICE_MEMORY;
    found->type = !range ? cudaMemoryTypeUnregistered : is_device_memory ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    found->device = range ? range->device : cudaInvalidDeviceId;
    found->devicePointer = range ? (void *)pointer : NULL;
    found->hostPointer = is_device_memory ? NULL : (void *)pointer;
    return end(cudaSuccess);
}

/* Device memory ------------------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaMalloc(void **pointer, size_t nbytes) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaMalloc);
    if (!error) error = allocate_device(pointer, nbytes);
    return end(error);
}

EXPORT cudaError_t cudaFree(void *pointer) {
    cudaError_t error = BEGIN(cudaFree);
    if (!error && pointer) error = free_device((uintptr_t)pointer);
    return end(error);
}

EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t nbytes, cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_STREAM(cudaMallocAsync, &stream);
    if (!error) error = allocate_device(pointer, nbytes);
    return end(error);
}

EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_STREAM(cudaFreeAsync, &stream);
    if (!error && pointer && !range_starting_at((uintptr_t)pointer, DEVICE_MEMORY)) error = cudaErrorInvalidValue;
    if (!error && pointer) {
        queue_work(stream, FREE)->destination = (uintptr_t)pointer;
        queued(stream);
    }
    return end(error);
}

/* Copies -------------------------------------------------------------------------------------------------------------------- */

static bool starts_on_device(const void *pointer) {
    struct range *range = range_at((uintptr_t)pointer);
    return range && range->kind == DEVICE_MEMORY;
}

static cudaError_t find_direction(const void *destination, const void *source, enum cudaMemcpyKind *direction) {
    bool to_device = starts_on_device(destination), from_device = starts_on_device(source);
    enum cudaMemcpyKind found = from_device ? (to_device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost)
                                            : (to_device ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost);
    if ((unsigned)*direction > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (*direction != cudaMemcpyDefault && *direction != found) /* the driver goes by the pointers (580.159), and says nothing */
        violate("a copy says direction %d, but its pointers say %d", (int)*direction, (int)found);
    *direction = found;
    return cudaSuccess;
}

static cudaError_t check_device_end(const void *pointer, size_t nbytes) {
    if (is_device_range((uintptr_t)pointer, nbytes)) return cudaSuccess;
    violate("a copy of %zu bytes reaches past the end of its device memory", nbytes);
    return cudaErrorInvalidValue;
}

static uintptr_t host_range_start_after(uintptr_t address, size_t nbytes) {
    for (uintptr_t page = address | (PAGE_NBYTES - 1); page - address < nbytes; page += PAGE_NBYTES)
        if (range_at(page)) return page;
    return 0;
}

/* Is the host side page-locked? All of it in one registration, or none of it: the driver looks at the first one only. */
static cudaError_t check_host_end(const void *pointer, size_t nbytes, bool *pinned) {
    struct range *range = range_at((uintptr_t)pointer);
    *pinned = range && lies_within(range, (uintptr_t)pointer, nbytes);
    if (*pinned || (!range && !host_range_start_after((uintptr_t)pointer, nbytes))) return cudaSuccess;
    violate("a copy of %zu bytes crosses the end of a registration", nbytes);
    return cudaErrorInvalidValue;
}

static cudaError_t stage(struct work *work, const void *source) {
    if (!moves_bytes) return cudaSuccess;
    work->staged = malloc(work->nbytes);
    if (work->staged && !copy_safely(work->staged, source, work->nbytes)) return cudaSuccess;
    violate("a copy of %zu bytes out of host memory that is not mapped", work->nbytes);
    return cudaErrorInvalidValue;
}

static void queue_copy(cudaStream_t stream, const struct work *description) {
    struct work *work = queue_work(stream, COPY);
    work->destination = description->destination;
    work->source = description->source;
    work->nbytes = description->nbytes;
    work->direction = description->direction;
    work->pinned = description->pinned;
    work->staged = description->staged;
    log_copy(work, stream);
    queued(stream);
}

static cudaError_t copy(void *destination, const void *source, size_t nbytes, enum cudaMemcpyKind direction, cudaStream_t stream) {
    if (!nbytes) return cudaSuccess;
    cudaError_t error = find_direction(destination, source, &direction);
    struct work work = {.destination = (uintptr_t)destination, .source = (uintptr_t)source, .nbytes = nbytes, .direction = direction};
    bool from_device = direction == cudaMemcpyDeviceToHost || direction == cudaMemcpyDeviceToDevice;
    bool to_device = direction == cudaMemcpyHostToDevice || direction == cudaMemcpyDeviceToDevice;
    if (!error && from_device) error = check_device_end(source, nbytes);
    if (!error && to_device) error = check_device_end(destination, nbytes);
    if (!error && !from_device) error = check_host_end(source, nbytes, &work.pinned);
    if (!error && direction == cudaMemcpyDeviceToHost) error = check_host_end(destination, nbytes, &work.pinned);
    if (!error && !from_device && !work.pinned) error = stage(&work, source); /* as the driver does, during the call */
    if (error) {
        free(work.staged);
        return error;
    }
    queue_copy(stream, &work);
    bool returns_late = direction == cudaMemcpyHostToHost || (direction == cudaMemcpyDeviceToHost && !work.pinned);
    if (returns_late) wait_for_work(stream, stream->queued);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t nbytes, enum cudaMemcpyKind direction,
                                   cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_STREAM(cudaMemcpyAsync, &stream);
    if (!error) error = copy(destination, source, nbytes, direction, stream);
    return end(error);
}

EXPORT cudaError_t cudaMemcpy(void *destination, const void *source, size_t nbytes, enum cudaMemcpyKind direction) {
    cudaStream_t stream = NULL;
    cudaError_t error = BEGIN_ON_STREAM(cudaMemcpy, &stream);
    if (!error) error = copy(destination, source, nbytes, direction, stream);
    stats.waits++;
    if (!error) wait_for_work(stream, stream->queued);
    return end(error ? error : devices[current_device()].broken);
}

static cudaError_t fill(void *destination, int value, size_t nbytes, cudaStream_t stream) {
    if (!nbytes) return cudaSuccess;
    if (!is_device_range((uintptr_t)destination, nbytes)) return cudaErrorInvalidValue;
    struct work *work = queue_work(stream, FILL);
    work->destination = (uintptr_t)destination;
    work->nbytes = nbytes;
    work->value = value;
    queued(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *destination, int value, size_t nbytes, cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_STREAM(cudaMemsetAsync, &stream);
    if (!error) error = fill(destination, value, nbytes, stream);
    return end(error);
}

EXPORT cudaError_t cudaMemset(void *destination, int value, size_t nbytes) {
    cudaStream_t stream = NULL;
    cudaError_t error = BEGIN_ON_STREAM(cudaMemset, &stream);
    if (!error) error = fill(destination, value, nbytes, stream);
    return end(error);
}

/* Streams and events -------------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaStreamCreateWithFlags);
    if (!error && (!stream || flags & ~1u)) error = cudaErrorInvalidValue;
    if (!error) *stream = make_stream(current_device(), flags);
    return end(error);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaStreamCreate);
    if (!error && !stream) error = cudaErrorInvalidValue;
    if (!error) *stream = make_stream(current_device(), 0);
    return end(error);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t error = BEGIN(cudaStreamDestroy);
    if (!error && (uintptr_t)stream <= 2) error = cudaErrorInvalidResourceHandle;
    if (!error) error = use_stream(&stream);
    if (!error) drop_stream(stream);
    return end(error);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaStreamSynchronize);
    if (!error) error = use_stream(&stream);
    stats.waits++;
    if (!error) wait_for_work(stream, stream->queued);
    return end(error ? error : devices[stream->device].broken);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaStreamQuery);
    if (!error) error = use_stream(&stream);
    if (!error && !polled(stream, stream->queued)) error = cudaErrorNotReady;
    return end(error && error != cudaErrorNotReady ? error : devices[stream->device].broken ? devices[stream->device].broken : error);
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    (void)flags;
    cudaError_t error = BEGIN_ON_DEVICE(cudaStreamWaitEvent);
    if (!error) error = use_stream(&stream);
    if (!error) error = use_event(event);
    if (!error && event->stream && event->stream != stream) { /* an event that was never recorded is complete */
        struct work *work = queue_work(stream, WAIT);
        work->waited_for = event->stream;
        work->waited_number = event->number;
        queued(stream);
    }
    return end(error);
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaEventCreateWithFlags);
    if (!error && (!event || flags & ~7u)) error = cudaErrorInvalidValue;
    if (!error) *event = make_event(flags);
    return end(error);
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaEventCreate);
    if (!error && !event) error = cudaErrorInvalidValue;
    if (!error) *event = make_event(0);
    return end(error);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaError_t error = BEGIN(cudaEventDestroy);
    if (!error) error = use_event(event);
    if (!error) drop_event(event); /* also before it is reached: what waits for it is not disturbed */
    return end(error);
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cudaError_t error = BEGIN_ON_DEVICE(cudaEventRecord);
    if (!error) error = use_stream(&stream);
    if (!error) error = use_event(event);
    if (!error && event->device != stream->device) error = cudaErrorInvalidResourceHandle;
    if (!error) {
        struct work *work = queue_work(stream, RECORD);
        work->event = event;
        work->record = ++event->records;
        event->stream = stream;
        event->number = work->number;
        queued(stream);
    }
    return end(error);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    cudaError_t error = BEGIN(cudaEventQuery);
    if (!error) error = use_event(event);
    if (!error) error = devices[event->device].broken;
    if (!error && event->stream && !polled(event->stream, event->number)) error = cudaErrorNotReady;
    return end(error);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cudaError_t error = BEGIN(cudaEventSynchronize);
    if (!error) error = use_event(event);
    stats.waits++;
    if (!error && event->stream) wait_for_work(event->stream, event->number);
    return end(error ? error : devices[event->device].broken);
}

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t stop) {
    cudaError_t error = BEGIN(cudaEventElapsedTime);
    if (!error) error = use_event(start);
    if (!error) error = use_event(stop);
    if (!error && (start->flags | stop->flags) & cudaEventDisableTiming) error = cudaErrorInvalidResourceHandle;
    if (!error && (!start->records || !stop->records)) error = cudaErrorInvalidResourceHandle;
    if (!error && (start->reached < start->records || stop->reached < stop->records)) error = cudaErrorNotReady;
    if (!error) *ms = (float)((double)(int64_t)(stop->reached_at_ns - start->reached_at_ns) / 1e6);
    return end(error);
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    cudaError_t error = BEGIN_ON_STREAM(cudaLaunchHostFunc, &stream);
    if (!error && !function) error = cudaErrorInvalidValue;
    if (!error) {
        struct work *work = queue_work(stream, CALL);
        work->call = function;
        work->argument = argument;
        queued(stream);
    }
    return end(error);
}

/* In place of a kernel: a function that is called in the stream's order, with the device memory that it uses. */
EXPORT cudaError_t sim_launch(cudaStream_t stream, cudaHostFn_t function, void *argument, const struct span *spans, int count) {
    cudaError_t error = BEGIN_ON_STREAM(cudaLaunchHostFunc, &stream);
    for (int index = 0; !error && index < count; index++) error = check_device_end((void *)spans[index].start, spans[index].nbytes);
    if (!error) {
        struct work *work = queue_work(stream, CALL);
        work->call = function;
        work->argument = argument;
        work->spans = malloc((count ? count : 1) * sizeof *spans);
        if (!work->spans) abort();
        memcpy(work->spans, spans, count * sizeof *spans);
        work->span_count = count;
        queued(stream);
    }
    return end(error);
}
