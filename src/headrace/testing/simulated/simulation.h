/* What the files of the simulated CUDA runtime share.
 *
 * All state is guarded by one lock. There is no thread per stream: queued work is carried out by whoever waits for it (or by the
 * clock, in timed mode), so that it happens as late as the rules of CUDA allow and the same way in every run with the same seed.
 *
 * Compiled with -DSIM_WITH_CUDA_HEADERS the names below come from NVIDIA's header, and the compiler compares every signature.
 */
#ifndef HEADRACE_SIMULATION_H
#define HEADRACE_SIMULATION_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define PAGE_NBYTES 4096ul

#ifdef SIM_WITH_CUDA_HEADERS
#include <cuda_runtime_api.h>
#else
/* Values from driver_types.h of CUDA 13.0; HIP has the same ones. */
typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999,
} cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};

enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2, cudaMemoryTypeManaged = 3 };

/* CUDA 13 added reserved words behind these fields, which are left alone so that older callers' structures do not overflow. */
struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer;
    void *hostPointer;
};

enum cudaDeviceAttr {
    cudaDevAttrCanMapHostMemory = 19,
    cudaDevAttrPciBusId = 33,
    cudaDevAttrPciDeviceId = 34,
    cudaDevAttrAsyncEngineCount = 40,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrPciDomainId = 50,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrHostRegisterSupported = 99,
    cudaDevAttrPageableMemoryAccessUsesHostPageTables = 100,
    cudaDevAttrHostRegisterReadOnlySupported = 113,
    cudaDevAttrGPUDirectRDMASupported = 116,
};

#define cudaHostRegisterMapped 2
#define cudaHostRegisterReadOnly 8
#define cudaStreamNonBlocking 1
#define cudaEventDisableTiming 2
#define cudaInvalidDeviceId (-2)

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *);
#endif

/* Functions that are counted, and that sim_fail can make fail. */
#define FUNCTIONS(X)                                                                                                             \
    X(cudaHostRegister) X(cudaHostUnregister) X(cudaHostAlloc) X(cudaFreeHost) X(cudaHostGetFlags) X(cudaHostGetDevicePointer)     \
    X(cudaPointerGetAttributes) X(cudaMalloc) X(cudaFree) X(cudaMallocAsync) X(cudaFreeAsync) X(cudaMemGetInfo) X(cudaMemcpyAsync) \
    X(cudaMemcpy) X(cudaMemsetAsync) X(cudaMemset) X(cudaStreamCreate) X(cudaStreamCreateWithFlags) X(cudaStreamDestroy)           \
    X(cudaStreamSynchronize) X(cudaStreamWaitEvent) X(cudaStreamQuery) X(cudaEventCreate) X(cudaEventCreateWithFlags)              \
    X(cudaEventDestroy) X(cudaEventRecord) X(cudaEventQuery) X(cudaEventSynchronize) X(cudaEventElapsedTime) X(cudaSetDevice)      \
    X(cudaGetDevice) X(cudaGetDeviceCount) X(cudaDeviceGetAttribute) X(cudaDeviceGetPCIBusId) X(cudaDeviceSynchronize)             \
    X(cudaRuntimeGetVersion) X(cudaDriverGetVersion) X(cudaLaunchHostFunc)
#define AS_ENUM(name) CALL_##name,
enum function { FUNCTIONS(AS_ENUM) FUNCTION_COUNT };
#undef AS_ENUM

/* Devices ------------------------------------------------------------------------------------------------------------------- */

enum { MAX_DEVICES = 16, ATTRIBUTE_COUNT = 160 };

struct bus {
    uint64_t free_at_ns; /* when the copies that were started before are through */
};

struct device {
    size_t total_nbytes, used_nbytes;
    bool has_context;
    int attributes[ATTRIBUTE_COUNT]; /* -1 where the attribute is not known */
    cudaError_t broken;              /* an error of queued work: all later calls give it, as with a context that is lost */
    struct bus to_device, to_host;
    cudaStream_t null_stream;
};

extern struct device devices[MAX_DEVICES];
extern int device_count;

/* Memory: ranges of addresses that the runtime knows ------------------------------------------------------------------------ */

enum range_kind { REGISTERED = 1, HOST_ALLOCATED = 2, DEVICE_MEMORY = 3 };

struct range {
    uintptr_t start;
    size_t nbytes;
    enum range_kind kind;
    int device;
    unsigned flags;
    char *shadow; /* device memory: where the simulator itself reads and writes it; NULL when no bytes are kept */
};

extern size_t pinned_nbytes, pinned_limit, registration_limit;
extern bool moves_bytes;

struct range *range_at(uintptr_t address);
struct range *range_starting_at(uintptr_t address, enum range_kind kind);
size_t count_ranges(enum range_kind kind);
bool lies_within(const struct range *range, uintptr_t address, size_t nbytes);
bool is_device_range(uintptr_t address, size_t nbytes);
cudaError_t register_memory(uintptr_t start, size_t nbytes, unsigned flags);
cudaError_t unregister_memory(uintptr_t start);
cudaError_t allocate_host(void **pointer, size_t nbytes, unsigned flags);
cudaError_t free_host(uintptr_t start);
cudaError_t allocate_device(void **pointer, size_t nbytes);
cudaError_t free_device(uintptr_t start);
int copy_safely(void *destination, const void *source, size_t nbytes); /* 0, or errno where memory is not mapped */
void *shadow_of(uintptr_t address, size_t nbytes);
void forget_memory(void);

/* Streams: queued work ------------------------------------------------------------------------------------------------------ */

enum work_kind { COPY, FILL, CALL, RECORD, WAIT, FREE };

struct span {
    uintptr_t start;
    size_t nbytes;
};

struct work {
    enum work_kind kind;
    uint64_t number; /* position in its stream, from 1 */
    uintptr_t destination, source;
    size_t nbytes;
    enum cudaMemcpyKind direction;
    bool pinned;              /* the host side is page-locked */
    void *staged;             /* copy of a pageable source, made when the copy was queued */
    int value;                /* FILL */
    cudaHostFn_t call;        /* CALL */
    void *argument;           /* CALL */
    struct span *spans;       /* CALL: device memory that the function uses */
    int span_count;
    cudaEvent_t event;        /* RECORD */
    uint64_t record;          /* RECORD: which record of the event */
    cudaStream_t waited_for;  /* WAIT: until that stream has finished this work */
    uint64_t waited_number;
    uint64_t queued_at_ns, due_at_ns;
    struct work *next;
};

#define STREAM_MARK 0x53545245u
#define EVENT_MARK 0x4556454eu

struct CUstream_st {
    uint32_t mark; /* STREAM_MARK while it can be used */
    unsigned generation;
    int device;
    unsigned flags;
    int number;
    uint64_t queued, finished;
    uint64_t last_due_ns;  /* timed: when the last copy is off the bus, */
    uint64_t last_done_ns; /* and when the last work that was carried out was done */
    struct work *head, *tail;
    bool running; /* its head is being carried out, by some thread without the lock */
    struct CUstream_st *next;
};

struct CUevent_st {
    uint32_t mark;
    unsigned generation;
    int device;
    unsigned flags;
    uint64_t records;      /* how often it was recorded */
    cudaStream_t stream;   /* of the last record */
    uint64_t number;       /* its work in that stream */
    uint64_t reached;      /* the last record that was reached, and when */
    uint64_t reached_at_ns;
    struct CUevent_st *next;
};

enum mode { MANUAL = 0, TIMED = 1, RANDOM = 2 };

extern enum mode mode;
extern uint64_t latency_ns, jitter_ns;
extern double bytes_per_ns;
extern unsigned patience;

cudaError_t use_stream(cudaStream_t *stream);
cudaError_t use_event(cudaEvent_t event);
cudaStream_t make_stream(int device, unsigned flags);
cudaEvent_t make_event(unsigned flags);
void drop_stream(cudaStream_t stream);
void drop_event(cudaEvent_t event);
size_t count_streams(void), count_events(void);
struct work *queue_work(cudaStream_t stream, enum work_kind kind);
void queued(cudaStream_t stream); /* call it when the work's fields are set */
void wait_for_work(cudaStream_t stream, uint64_t number);
void wait_for_device(int device);
bool polled(cudaStream_t stream, uint64_t number); /* true when finished */
bool is_queued_for(uintptr_t start, size_t nbytes, size_t *copy_nbytes);
void wait_while_running(uintptr_t start, size_t nbytes);
long release_work(long count);
void set_mode(enum mode wanted);
void forget_streams(void);
uint64_t now_ns(void);

/* Books -------------------------------------------------------------------------------------------------------------------- */

/* Order and size are those of Stats in __init__.py. */
struct stats {
    uint64_t h2d_pinned_nbytes, h2d_pageable_nbytes, h2d_copies, d2d_nbytes, d2d_copies, d2h_nbytes, d2h_copies;
    uint64_t registrations, unregistrations, host_allocations, device_allocations;
    uint64_t pinned_nbytes, peak_pinned_nbytes, device_nbytes, peak_device_nbytes;
    uint64_t finished, calls_on_device, waits, violations, copied_by_pinning_nbytes;
};

struct copy_record {
    uint64_t nbytes, stream;
    int32_t direction, device, pinned, padding;
};

extern struct stats stats;
extern pthread_mutex_t lock;
extern pthread_cond_t changed;
extern unsigned generation;

void violate(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_copy(const struct work *work, const struct CUstream_st *stream);
cudaError_t injected(enum function function);
cudaError_t injected_into_work(void);
uint64_t random_below(uint64_t bound);

int current_device(void);
void touch_device(const char *caller); /* a call that makes a context on the current device */

#endif
