/* Which addresses the runtime knows: registered and allocated host memory, and device memory.
 *
 * Device memory is a memory file mapped twice: its pointer is closed to the host (touching it is a SIGSEGV), and the simulator
 * works through a second mapping. What was freed stays reserved until the next reset, so that no pointer is ever given out twice.
 *
 * Which mappings can be registered was measured with io_uring's long-term pins and read in reports, not seen on a GPU.
 */
#define _GNU_SOURCE
#include "simulation.h"

#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define TMPFS 0x01021994
#define POPULATE_WRITE 23 /* MADV_POPULATE_WRITE, Linux 5.14 */
#define RAMFS 0x858458f6
#define HUGETLBFS 0x958458f6
#define FRESH 0xCD /* what fresh device memory holds */

size_t pinned_nbytes, pinned_limit, registration_limit;
bool moves_bytes = true;

static struct range *ranges; /* sorted by address, never overlapping */
static size_t range_count, range_room;
static struct span *reserved; /* addresses of freed device memory */
static size_t reserved_count, reserved_room;

static uintptr_t page_down(uintptr_t address) { return address & ~(PAGE_NBYTES - 1); }
static uintptr_t page_up(uintptr_t address) { return page_down(address + PAGE_NBYTES - 1); }
static size_t pages_nbytes(uintptr_t start, size_t nbytes) { return page_up(start + nbytes) - page_down(start); }

/* Index of the first range that ends above the address. */
static size_t first_above(uintptr_t address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start + ranges[middle].nbytes <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct range *range_at(uintptr_t address) {
    size_t index = first_above(address);
    return index < range_count && ranges[index].start <= address ? &ranges[index] : NULL;
}

struct range *range_starting_at(uintptr_t address, enum range_kind kind) {
    struct range *range = range_at(address);
    return range && range->start == address && range->kind == kind ? range : NULL;
}

size_t count_ranges(enum range_kind kind) {
    size_t count = 0;
    for (size_t index = 0; index < range_count; index++) count += ranges[index].kind == kind;
    return count;
}

bool lies_within(const struct range *range, uintptr_t address, size_t nbytes) {
    return range && address >= range->start && nbytes <= range->nbytes && address - range->start <= range->nbytes - nbytes;
}

bool is_device_range(uintptr_t address, size_t nbytes) {
    struct range *range = range_at(address);
    return range && range->kind == DEVICE_MEMORY && lies_within(range, address, nbytes);
}

static void *grow(void *array, size_t count, size_t *room, size_t item_nbytes) {
    if (count < *room) return array;
    *room = *room ? 2 * *room : 64;
    array = realloc(array, *room * item_nbytes);
    if (!array) abort();
    return array;
}

static struct range *add_range(uintptr_t start, size_t nbytes, enum range_kind kind) {
    ranges = grow(ranges, range_count, &range_room, sizeof *ranges);
    size_t index = first_above(start);
    memmove(&ranges[index + 1], &ranges[index], (range_count - index) * sizeof *ranges);
    range_count++;
    ranges[index] = (struct range){.start = start, .nbytes = nbytes, .kind = kind, .device = current_device()};
    return &ranges[index];
}

static void remove_range(struct range *range) {
    size_t index = range - ranges;
    memmove(range, range + 1, (range_count - index - 1) * sizeof *ranges);
    range_count--;
}

static bool meets_any_page(uintptr_t start, size_t nbytes) {
    uintptr_t low = page_down(start), high = page_up(start + nbytes);
    size_t index = first_above(low);
    return index < range_count && page_down(ranges[index].start) < high;
}

/* Ranges may share a page, as long as they share no byte (seen on driver 580). */
static bool meets_any_byte(uintptr_t start, size_t nbytes) {
    size_t index = first_above(start);
    return index < range_count && ranges[index].start < start + nbytes;
}

/* Mappings ------------------------------------------------------------------------------------------------------------------ */

static bool is_in_memory(const char *path) {
    static const char *const kernels_own[] = {"/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage"};
    for (size_t index = 0; index < sizeof kernels_own / sizeof *kernels_own; index++)
        if (!strncmp(path, kernels_own[index], strlen(kernels_own[index]))) return true;
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", path); /* the folder, since the file may be deleted */
    struct statfs found;
    if (statfs(dirname(folder), &found)) return false;
    return found.f_type == TMPFS || found.f_type == RAMFS || (unsigned long)found.f_type == HUGETLBFS;
}

/* One line of /proc/self/maps: can its pages be pinned for long? Pins are taken for writing, unless read-only was asked for. */
static bool can_be_pinned(const char *access, const char *path, bool for_reading) {
    if (access[0] != 'r') return false;
    if (for_reading) return true;
    if (access[1] != 'w') return false;
    bool is_shared_disk_file = access[3] == 's' && path[0] == '/' && !is_in_memory(path);
    return !is_shared_disk_file; /* the kernel refuses long-term pins of shared file pages that need write-back */
}

/* A pin for writing faults the pages of a shared file in as a write would: that moves the file's times, though no byte changes. */
static void fault_for_writing(uintptr_t start, uintptr_t end) {
    if (madvise((void *)start, end - start, POPULATE_WRITE))
        for (; start < end; start += PAGE_NBYTES) *(volatile char *)start = *(volatile char *)start;
}

/* Walk the mappings of [start, end). False where a page is missing or cannot be pinned. */
static bool pages_can_be_pinned(uintptr_t start, uintptr_t end, bool for_reading, uint64_t *copied_nbytes) {
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return true; /* not told: trust the caller */
    char line[4608];
    uintptr_t wanted = start;
    while (wanted < end && fgets(line, sizeof line, maps)) {
        unsigned long low, high;
        char access[5];
        int path_at = 0;
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %n", &low, &high, access, &path_at) < 3 || wanted >= high) continue;
        char *path = path_at ? line + path_at : "";
        path[strcspn(path, "\n")] = 0;
        if (wanted < low || !can_be_pinned(access, path, for_reading)) break;
        uintptr_t covered_end = high < end ? high : end;
        if (access[3] == 'p' && access[1] == 'w' && path[0] == '/') *copied_nbytes += covered_end - wanted;
        if (access[3] == 's' && path[0] == '/' && !for_reading) fault_for_writing(wanted, covered_end);
        wanted = covered_end;
    }
    fclose(maps);
    return wanted >= end;
}

static bool is_mapped(uintptr_t start, size_t nbytes) {
    uintptr_t low = page_down(start), high = page_up(start + nbytes);
    unsigned char resident[1024];
    for (; low < high; low += sizeof resident * PAGE_NBYTES) {
        size_t length = high - low < sizeof resident * PAGE_NBYTES ? high - low : sizeof resident * PAGE_NBYTES;
        if (mincore((void *)low, length, resident) && errno == ENOMEM) return false;
    }
    return true;
}

int copy_safely(void *destination, const void *source, size_t nbytes) {
    size_t done = 0;
    while (done < nbytes) {
        struct iovec to = {(char *)destination + done, nbytes - done}, from = {(char *)source + done, nbytes - done};
        ssize_t moved = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        if (moved > 0) {
            done += moved;
        } else if (moved < 0 && (errno == ENOSYS || errno == EPERM)) { /* a sandbox forbids it: look first, then copy */
            if (!is_mapped((uintptr_t)source, nbytes) || !is_mapped((uintptr_t)destination, nbytes)) return EFAULT;
            memmove(destination, source, nbytes);
            return 0;
        } else {
            return moved < 0 ? errno : EFAULT;
        }
    }
    return 0;
}

/* Registered and allocated host memory -------------------------------------------------------------------------------------- */

static void count_pinned(int64_t nbytes) {
    pinned_nbytes += nbytes;
    stats.pinned_nbytes = pinned_nbytes;
    if (pinned_nbytes > stats.peak_pinned_nbytes) stats.peak_pinned_nbytes = pinned_nbytes;
}

cudaError_t register_memory(uintptr_t start, size_t nbytes, unsigned flags) {
    const int *attributes = devices[current_device()].attributes;
    if (!start || !nbytes || flags & ~15u) return cudaErrorInvalidValue;
    if (attributes[cudaDevAttrHostRegisterSupported] != 1) return cudaErrorNotSupported;
    if (flags & cudaHostRegisterReadOnly && attributes[cudaDevAttrHostRegisterReadOnlySupported] != 1) return cudaErrorNotSupported;
    if (meets_any_byte(start, nbytes)) return cudaErrorHostMemoryAlreadyRegistered;
    bool for_reading = flags & cudaHostRegisterReadOnly || attributes[cudaDevAttrPageableMemoryAccessUsesHostPageTables] == 1;
    uint64_t copied_nbytes = 0;
    if (!pages_can_be_pinned(page_down(start), page_up(start + nbytes), for_reading, &copied_nbytes)) return cudaErrorInvalidValue;
    size_t locked_nbytes = pages_nbytes(start, nbytes);
    if (nbytes > registration_limit) return cudaErrorMemoryAllocation;
    if (locked_nbytes > pinned_limit || pinned_nbytes > pinned_limit - locked_nbytes) return cudaErrorMemoryAllocation;
    add_range(start, nbytes, REGISTERED)->flags = flags;
    stats.copied_by_pinning_nbytes += copied_nbytes;
    stats.registrations++;
    count_pinned(locked_nbytes);
    return cudaSuccess;
}

static void check_nothing_is_queued(const struct range *range, const char *caller) {
    size_t copy_nbytes;
    if (is_queued_for(range->start, range->nbytes, &copy_nbytes))
        violate("%s(%p) while a copy of %zu bytes from or to it is queued", caller, (void *)range->start, copy_nbytes);
}

cudaError_t unregister_memory(uintptr_t start) {
    struct range *range = range_starting_at(start, REGISTERED);
    if (!range) return range_at(start) ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered;
    check_nothing_is_queued(range, "cudaHostUnregister");
    if (!is_mapped(range->start, range->nbytes))
        violate("cudaHostUnregister(%p) after its %zu bytes were unmapped", (void *)range->start, range->nbytes);
    wait_while_running(start, range->nbytes);
    range = range_starting_at(start, REGISTERED); /* the lock was open: another thread may have moved or removed it */
    if (!range) return cudaErrorHostMemoryNotRegistered;
    count_pinned(-(int64_t)pages_nbytes(range->start, range->nbytes));
    stats.unregistrations++;
    remove_range(range);
    return cudaSuccess;
}

/* A mapping on addresses that no range claims: memory that was unmapped before it was unregistered leaves such claims. */
static void *map_unclaimed(size_t nbytes, int protection, int flags, int descriptor) {
    void *mapped = mmap(NULL, nbytes, protection, flags, descriptor, 0);
    if (mapped == MAP_FAILED || !meets_any_page((uintptr_t)mapped, nbytes)) return mapped;
    void *again = map_unclaimed(nbytes, protection, flags, descriptor);
    munmap(mapped, nbytes);
    return again;
}

cudaError_t allocate_host(void **pointer, size_t nbytes, unsigned flags) {
    if (!pointer) return cudaErrorInvalidValue;
    *pointer = NULL;
    if (!nbytes) return cudaSuccess;
    size_t locked_nbytes = page_up(nbytes);
    if (locked_nbytes > pinned_limit || pinned_nbytes > pinned_limit - locked_nbytes) return cudaErrorMemoryAllocation;
    void *mapped = map_unclaimed(locked_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
    add_range((uintptr_t)mapped, nbytes, HOST_ALLOCATED)->flags = flags;
    stats.host_allocations++;
    count_pinned(locked_nbytes);
    *pointer = mapped;
    return cudaSuccess;
}

cudaError_t free_host(uintptr_t start) {
    struct range *range = range_starting_at(start, HOST_ALLOCATED);
    if (!range) return cudaErrorInvalidValue;
    check_nothing_is_queued(range, "cudaFreeHost");
    wait_while_running(start, range->nbytes);
    range = range_starting_at(start, HOST_ALLOCATED);
    if (!range) return cudaErrorInvalidValue;
    munmap((void *)range->start, page_up(range->nbytes));
    count_pinned(-(int64_t)page_up(range->nbytes));
    remove_range(range);
    return cudaSuccess;
}

/* Device memory ------------------------------------------------------------------------------------------------------------- */

static bool map_device_memory(size_t nbytes, void **pointer, char **shadow) {
    *shadow = NULL;
    if (!moves_bytes) {
        *pointer = map_unclaimed(nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        return *pointer != MAP_FAILED;
    }
    int file = memfd_create("simulated-device", MFD_CLOEXEC);
    if (file < 0) return false;
    *pointer = MAP_FAILED;
    if (!ftruncate(file, nbytes)) {
        *pointer = map_unclaimed(nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file);
        void *second = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        if (second == MAP_FAILED && *pointer != MAP_FAILED) munmap(*pointer, nbytes), *pointer = MAP_FAILED;
        else *shadow = second;
    }
    close(file);
    if (*pointer == MAP_FAILED) return false;
    memset(*shadow, FRESH, nbytes);
    return true;
}

cudaError_t allocate_device(void **pointer, size_t nbytes) {
    if (!pointer) return cudaErrorInvalidValue;
    *pointer = NULL;
    if (!nbytes) return cudaSuccess;
    struct device *device = &devices[current_device()];
    size_t rounded_nbytes = page_up(nbytes);
    if (rounded_nbytes < nbytes || rounded_nbytes > device->total_nbytes - device->used_nbytes) return cudaErrorMemoryAllocation;
    char *shadow;
    if (!map_device_memory(rounded_nbytes, pointer, &shadow)) return *pointer = NULL, cudaErrorMemoryAllocation;
    add_range((uintptr_t)*pointer, nbytes, DEVICE_MEMORY)->shadow = shadow;
    device->used_nbytes += rounded_nbytes;
    stats.device_allocations++;
    stats.device_nbytes += rounded_nbytes;
    if (stats.device_nbytes > stats.peak_device_nbytes) stats.peak_device_nbytes = stats.device_nbytes;
    return cudaSuccess;
}

static void reserve(void *address, size_t nbytes) {
    mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    reserved = grow(reserved, reserved_count, &reserved_room, sizeof *reserved);
    reserved[reserved_count++] = (struct span){(uintptr_t)address, nbytes};
}

static void release_device_range(struct range *range) {
    size_t nbytes = page_up(range->nbytes);
    reserve((void *)range->start, nbytes);
    if (range->shadow) reserve(range->shadow, nbytes);
    devices[range->device].used_nbytes -= nbytes;
    stats.device_nbytes -= nbytes;
    remove_range(range);
}

cudaError_t free_device(uintptr_t start) {
    struct range *range = range_starting_at(start, DEVICE_MEMORY);
    if (!range) return cudaErrorInvalidValue;
    check_nothing_is_queued(range, "cudaFree");
    wait_while_running(start, range->nbytes);
    range = range_starting_at(start, DEVICE_MEMORY);
    if (!range) return cudaErrorInvalidValue;
    release_device_range(range);
    return cudaSuccess;
}

void *shadow_of(uintptr_t address, size_t nbytes) {
    struct range *range = range_at(address);
    if (!range || range->kind != DEVICE_MEMORY || !range->shadow || !lies_within(range, address, nbytes)) return NULL;
    return range->shadow + (address - range->start);
}

void forget_memory(void) {
    while (range_count) {
        struct range *last = &ranges[range_count - 1];
        if (last->kind == DEVICE_MEMORY) {
            release_device_range(last);
            continue;
        }
        if (last->kind == HOST_ALLOCATED) munmap((void *)last->start, page_up(last->nbytes));
        remove_range(last);
    }
    for (size_t index = 0; index < reserved_count; index++) munmap((void *)reserved[index].start, reserved[index].nbytes);
    reserved_count = 0;
    pinned_nbytes = 0;
}
