/* Streams, events and the work that is queued on them.
 *
 * Manual: work is carried out when the host waits for it, by the waiting thread and no sooner; where several streams could go on,
 * chance decides (with a seed). Random: also at any other moment, by chance. Timed: by a clock thread, after a delay and at the
 * speed of the bus, which the streams of a device share; the sum of the delays is kept in virtual time, so that a clock thread
 * that wakes late does not make the device slower than it says.
 */
#define _GNU_SOURCE
#include "simulation.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum mode mode = MANUAL;
uint64_t latency_ns, jitter_ns;
double bytes_per_ns;
unsigned patience = 64;

enum { QUARANTINE = 1 << 16 }; /* destroyed events that are kept, so that using one is noticed */

static cudaStream_t streams; /* alive, or with work left */
static struct CUevent_st *dead_first, *dead_last;
static size_t dead_count, live_streams, live_events;
static int last_stream_number;
static pthread_t clock_thread;
static bool clock_runs;
static unsigned polls; /* unsuccessful ones */

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* Handles ------------------------------------------------------------------------------------------------------------------- */

cudaStream_t make_stream(int device, unsigned flags) {
    cudaStream_t stream = calloc(1, sizeof *stream); /* never freed: a stale handle must stay recognisable */
    if (!stream) abort();
    stream->mark = STREAM_MARK;
    stream->generation = generation;
    stream->device = device;
    stream->flags = flags;
    stream->number = ++last_stream_number;
    stream->next = streams;
    streams = stream;
    live_streams++;
    return stream;
}

static cudaStream_t null_stream(int device) {
    if (!devices[device].null_stream) {
        devices[device].null_stream = make_stream(device, 0);
        live_streams--; /* nobody has to destroy it */
    }
    return devices[device].null_stream;
}

/* From the caller's handle to a stream; 0 and cudaStreamLegacy (1) are the null stream of the current device. */
cudaError_t use_stream(cudaStream_t *stream) {
    if ((uintptr_t)*stream <= 1) {
        *stream = null_stream(current_device());
        return cudaSuccess;
    }
    if ((uintptr_t)*stream == 2) return cudaErrorNotSupported; /* cudaStreamPerThread is not simulated */
    if ((*stream)->generation != generation) return cudaErrorInvalidResourceHandle;
    if ((*stream)->mark == STREAM_MARK) return cudaSuccess;
    violate("stream %d is used after it was destroyed", (*stream)->number);
    return cudaErrorInvalidResourceHandle;
}

void drop_stream(cudaStream_t stream) {
    stream->mark = 0; /* what is queued is still carried out */
    live_streams--;
    if (stream->head) return;
    for (cudaStream_t *place = &streams; *place; place = &(*place)->next) {
        if (*place == stream) {
            *place = stream->next;
            return;
        }
    }
}

cudaEvent_t make_event(unsigned flags) {
    struct CUevent_st *event;
    if (dead_count > QUARANTINE) {
        event = dead_first;
        dead_first = event->next;
        dead_count--;
    } else {
        event = malloc(sizeof *event);
        if (!event) abort();
    }
    *event = (struct CUevent_st){.mark = EVENT_MARK, .generation = generation, .device = current_device(), .flags = flags};
    live_events++;
    return event;
}

cudaError_t use_event(cudaEvent_t event) {
    if (!event || event->generation != generation) return cudaErrorInvalidResourceHandle;
    if (event->mark == EVENT_MARK) return cudaSuccess;
    violate("an event is used after it was destroyed");
    return cudaErrorInvalidResourceHandle;
}

void drop_event(cudaEvent_t event) {
    event->mark = 0;
    event->next = NULL;
    if (dead_count++) dead_last->next = event;
    else dead_first = event;
    dead_last = event;
    live_events--;
}

size_t count_streams(void) { return live_streams; }
size_t count_events(void) { return live_events; }

/* Carrying out ---------------------------------------------------------------------------------------------------------------- */

static uint64_t latest(uint64_t first, uint64_t second) { return first > second ? first : second; }

static void free_work(struct work *work) {
    free(work->staged);
    free(work->spans);
    free(work);
}

static void finish_head(cudaStream_t stream) {
    struct work *work = stream->head;
    stream->finished = work->number;
    if (work->due_at_ns) stream->last_done_ns = work->due_at_ns;
    stream->head = work->next;
    if (!stream->head) stream->tail = NULL;
    if (work->kind == RECORD && work->event->generation == generation && work->event->reached < work->record) {
        work->event->reached = work->record;
        work->event->reached_at_ns = mode == TIMED ? latest(work->queued_at_ns, stream->last_done_ns) : now_ns();
    }
    free_work(work);
}

/* Records and waits take no time: they are through as soon as what lies before them is. */
static bool takes_no_time(const struct work *work) {
    return work->kind == RECORD || (work->kind == WAIT && work->waited_for->finished >= work->waited_number);
}

static void settle(void) {
    for (bool again = true; again;) {
        again = false;
        for (cudaStream_t stream = streams; stream; stream = stream->next)
            while (stream->head && !stream->running && takes_no_time(stream->head)) finish_head(stream), again = true;
    }
}

static bool is_runnable(cudaStream_t stream) { return stream->head && !stream->running && stream->head->kind != WAIT; }

/* Addresses to work with, NULL where nothing has to be moved. False, and a violation, where memory is gone. */
static bool find_end(uintptr_t address, const struct work *work, bool is_device, bool is_destination, void **found) {
    const char *end = is_destination ? "into" : "out of";
    *found = (void *)address;
    if (is_device) {
        if (!is_device_range(address, work->nbytes)) {
            violate("a copy of %zu bytes %s device memory that was freed before the copy ran", work->nbytes, end);
            return false;
        }
        *found = shadow_of(address, work->nbytes);
    } else if (work->pinned) {
        struct range *range = range_at(address);
        if (!range || range->kind == DEVICE_MEMORY || !lies_within(range, address, work->nbytes)) {
            violate("a copy of %zu bytes %s host memory that was unregistered before the copy ran", work->nbytes, end);
            return false;
        }
    }
    return true;
}

static void carry_out_copy(struct work *work) {
    void *from = work->staged, *to;
    bool from_device = work->direction == cudaMemcpyDeviceToHost || work->direction == cudaMemcpyDeviceToDevice;
    bool to_device = work->direction == cudaMemcpyHostToDevice || work->direction == cudaMemcpyDeviceToDevice;
    if (!find_end(work->destination, work, to_device, true, &to)) return;
    if (!from && !find_end(work->source, work, from_device, false, &from)) return;
    if (!moves_bytes || !from || !to) return;
    pthread_mutex_unlock(&lock);
    int failure = copy_safely(to, from, work->nbytes);
    pthread_mutex_lock(&lock);
    if (failure) violate("a copy of %zu bytes from or to host memory that is no longer mapped", work->nbytes);
}

static void carry_out_fill(struct work *work) {
    void *to;
    if (!find_end(work->destination, work, true, true, &to) || !to) return;
    pthread_mutex_unlock(&lock);
    memset(to, work->value, work->nbytes);
    pthread_mutex_lock(&lock);
}

static void carry_out_call(struct work *work) {
    for (int index = 0; index < work->span_count; index++) {
        if (!is_device_range(work->spans[index].start, work->spans[index].nbytes)) {
            violate("a kernel on %zu bytes of device memory that was freed before it ran", work->spans[index].nbytes);
            return;
        }
    }
    stats.calls_on_device++;
    pthread_mutex_unlock(&lock);
    work->call(work->argument);
    pthread_mutex_lock(&lock);
}

/* Carries out the head of a runnable stream, with the lock open while bytes are moved. */
static void carry_out(cudaStream_t stream) {
    struct work *work = stream->head;
    stream->running = true;
    struct device *device = &devices[stream->device];
    if (!device->broken) device->broken = injected_into_work();
    if (device->broken) ; /* nothing runs on a device whose context is lost */
    else if (work->kind == COPY) carry_out_copy(work);
    else if (work->kind == FILL) carry_out_fill(work);
    else if (work->kind == CALL) carry_out_call(work);
    else if (work->kind == FREE) free_device(work->destination);
    stream->running = false;
    stats.finished++;
    finish_head(stream);
    settle();
    pthread_cond_broadcast(&changed);
}

/* Chance among the streams that can go on; NULL when none can. */
static cudaStream_t any_runnable(void) {
    uint64_t count = 0;
    for (cudaStream_t stream = streams; stream; stream = stream->next) count += is_runnable(stream);
    if (!count) return NULL;
    uint64_t chosen = random_below(count);
    for (cudaStream_t stream = streams; stream; stream = stream->next)
        if (is_runnable(stream) && !chosen--) return stream;
    return NULL;
}

long release_work(long count) {
    long done = 0;
    for (cudaStream_t stream; done < count && (stream = any_runnable()); done++) carry_out(stream);
    return done;
}

/* Waiting --------------------------------------------------------------------------------------------------------------------- */

struct goal {
    cudaStream_t stream;
    uint64_t number;
};

struct goals {
    struct goal *items;
    size_t count, room;
};

/* What has to be finished so that `number` of the stream is: the work before it, and what that waits for on other streams. */
static void add_goal(struct goals *goals, cudaStream_t stream, uint64_t number) {
    if (stream->finished >= number) return;
    uint64_t from = 0;
    struct goal *goal = NULL;
    for (size_t index = 0; index < goals->count; index++)
        if (goals->items[index].stream == stream) goal = &goals->items[index], from = goal->number;
    if (from >= number) return;
    if (!goal) {
        if (goals->count == goals->room) {
            goals->room = goals->room ? 2 * goals->room : 8;
            goals->items = realloc(goals->items, goals->room * sizeof *goals->items);
            if (!goals->items) abort();
        }
        goal = &goals->items[goals->count++];
    }
    *goal = (struct goal){stream, number};
    for (struct work *work = stream->head; work && work->number <= number; work = work->next)
        if (work->number > from && work->kind == WAIT) add_goal(goals, work->waited_for, work->waited_number);
}

static cudaStream_t any_needed(const struct goals *goals) {
    uint64_t count = 0;
    for (size_t index = 0; index < goals->count; index++) {
        const struct goal *goal = &goals->items[index];
        count += is_runnable(goal->stream) && goal->stream->head->number <= goal->number;
    }
    if (!count) return NULL;
    uint64_t chosen = random_below(count);
    for (size_t index = 0; index < goals->count; index++) {
        const struct goal *goal = &goals->items[index];
        if (is_runnable(goal->stream) && goal->stream->head->number <= goal->number && !chosen--) return goal->stream;
    }
    return NULL;
}

void wait_for_work(cudaStream_t stream, uint64_t number) {
    struct goals goals = {0};
    unsigned started_in = generation;
    settle();
    while (stream->finished < number && generation == started_in) {
        if (mode != TIMED) add_goal(&goals, stream, number);
        cudaStream_t needed = mode == TIMED ? NULL : any_needed(&goals);
        if (needed) carry_out(needed);
        else pthread_cond_wait(&changed, &lock); /* the clock, or another waiting thread, is at it */
    }
    free(goals.items);
}

void wait_for_device(int device) {
    for (cudaStream_t stream = streams; stream;) {
        if (stream->device == device && stream->finished < stream->queued) {
            wait_for_work(stream, stream->queued);
            stream = streams; /* the lock was open */
        } else {
            stream = stream->next;
        }
    }
}

bool polled(cudaStream_t stream, uint64_t number) {
    settle();
    if (stream->finished >= number) return true;
    bool goes_on = mode == RANDOM ? random_below(2) : mode == MANUAL && ++polls % patience == 0;
    if (goes_on) { /* whoever asks often enough gets an end of it */
        struct goals goals = {0};
        add_goal(&goals, stream, number);
        cudaStream_t needed = any_needed(&goals);
        free(goals.items);
        if (needed) carry_out(needed);
    }
    return false;
}

/* Queueing -------------------------------------------------------------------------------------------------------------------- */

static void append(cudaStream_t stream, struct work *work) {
    work->number = ++stream->queued;
    work->queued_at_ns = now_ns();
    if (stream->tail) stream->tail->next = work;
    else stream->head = work;
    stream->tail = work;
}

static void append_wait(cudaStream_t stream, cudaStream_t other) {
    if (other->finished >= other->queued) return;
    struct work *work = calloc(1, sizeof *work);
    if (!work) abort();
    work->kind = WAIT;
    work->waited_for = other;
    work->waited_number = other->queued;
    append(stream, work);
}

/* The null stream and streams without cudaStreamNonBlocking wait for each other. */
static void join_with_null_stream(cudaStream_t stream) {
    cudaStream_t null = devices[stream->device].null_stream;
    if (!null || stream->flags & cudaStreamNonBlocking) return;
    if (stream != null) {
        append_wait(stream, null);
        return;
    }
    for (cudaStream_t other = streams; other; other = other->next)
        if (other != null && other->device == null->device && !(other->flags & cudaStreamNonBlocking)) append_wait(null, other);
}

struct work *queue_work(cudaStream_t stream, enum work_kind kind) {
    struct work *work = calloc(1, sizeof *work);
    if (!work) abort();
    work->kind = kind;
    join_with_null_stream(stream);
    append(stream, work);
    return work;
}

void queued(cudaStream_t stream) {
    (void)stream;
    settle();
    pthread_cond_broadcast(&changed);
    while (mode == RANDOM && random_below(2))
        if (!release_work(1)) break;
}

/* What is queued for memory --------------------------------------------------------------------------------------------------- */

static bool meets(uintptr_t start, size_t nbytes, uintptr_t other, size_t other_nbytes) {
    return start < other + other_nbytes && other < start + nbytes;
}

static bool touches(const struct work *work, uintptr_t start, size_t nbytes) {
    if (work->kind == CALL) {
        for (int index = 0; index < work->span_count; index++)
            if (meets(start, nbytes, work->spans[index].start, work->spans[index].nbytes)) return true;
        return false;
    }
    if (work->kind != COPY && work->kind != FILL) return false;
    if (meets(start, nbytes, work->destination, work->nbytes)) return true;
    return work->kind == COPY && !work->staged && meets(start, nbytes, work->source, work->nbytes);
}

bool is_queued_for(uintptr_t start, size_t nbytes, size_t *copy_nbytes) {
    for (cudaStream_t stream = streams; stream; stream = stream->next) {
        for (struct work *work = stream->head; work; work = work->next) {
            if (touches(work, start, nbytes)) {
                *copy_nbytes = work->nbytes;
                return true;
            }
        }
    }
    return false;
}

static bool is_running_for(uintptr_t start, size_t nbytes) {
    for (cudaStream_t stream = streams; stream; stream = stream->next)
        if (stream->running && touches(stream->head, start, nbytes)) return true;
    return false;
}

void wait_while_running(uintptr_t start, size_t nbytes) {
    while (is_running_for(start, nbytes)) pthread_cond_wait(&changed, &lock);
}

/* The clock ------------------------------------------------------------------------------------------------------------------- */

static void set_due(cudaStream_t stream, struct work *work) {
    bool is_copy = work->kind == COPY && work->direction != cudaMemcpyDeviceToDevice;
    struct device *device = &devices[stream->device];
    struct bus *bus = work->direction == cudaMemcpyDeviceToHost ? &device->to_host : &device->to_device;
    uint64_t start = latest(work->queued_at_ns, stream->last_due_ns);
    uint64_t delay = latency_ns + (jitter_ns ? random_below(jitter_ns + 1) : 0);
    if (is_copy) {
        start = latest(start, bus->free_at_ns);
        if (bytes_per_ns > 0) start += (uint64_t)(work->nbytes / bytes_per_ns);
        bus->free_at_ns = start; /* the delay of one copy does not keep the next one off the bus */
    }
    work->due_at_ns = start + delay;
    stream->last_due_ns = is_copy ? start : start + delay;
    if (!work->due_at_ns) work->due_at_ns = 1;
}

static cudaStream_t next_due(uint64_t *due_at_ns) {
    cudaStream_t next = NULL;
    for (cudaStream_t stream = streams; stream; stream = stream->next) {
        if (!is_runnable(stream)) continue;
        if (!stream->head->due_at_ns) set_due(stream, stream->head);
        if (next && stream->head->due_at_ns >= *due_at_ns) continue;
        next = stream;
        *due_at_ns = stream->head->due_at_ns;
    }
    return next;
}

static void *run_clock(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    while (mode == TIMED) {
        uint64_t due_at_ns;
        cudaStream_t stream = next_due(&due_at_ns);
        if (!stream) {
            pthread_cond_wait(&changed, &lock);
        } else if (due_at_ns <= now_ns()) {
            carry_out(stream);
        } else {
            struct timespec moment = {due_at_ns / 1000000000, due_at_ns % 1000000000};
            pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &moment);
        }
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

void set_mode(enum mode wanted) {
    bool stops = clock_runs && wanted != TIMED;
    mode = wanted;
    polls = 0;
    pthread_cond_broadcast(&changed);
    if (stops) {
        clock_runs = false;
        pthread_mutex_unlock(&lock);
        pthread_join(clock_thread, NULL);
        pthread_mutex_lock(&lock);
    }
    if (wanted == TIMED && !clock_runs) clock_runs = !pthread_create(&clock_thread, NULL, run_clock, NULL);
}

/* Forgets all handles and all work, finished or not; the devices are set up anew by the caller. */
void forget_streams(void) {
    for (cudaStream_t stream = streams; stream; stream = stream->next) {
        while (stream->running) pthread_cond_wait(&changed, &lock);
        while (stream->head) {
            struct work *work = stream->head;
            stream->head = work->next;
            free_work(work);
        }
        stream->tail = NULL;
        stream->mark = 0;
        stream->finished = stream->queued;
    }
    streams = NULL;
    live_streams = live_events = 0;
    last_stream_number = 0;
    pthread_cond_broadcast(&changed);
}
