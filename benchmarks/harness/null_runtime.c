/* A CUDA runtime that does nothing, at once: what is left of a call's price is the caller's own. */
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define NOTHING(name)                                                                                                            \
    EXPORT int name(void) { return 0; }

NOTHING(cudaHostRegister)
NOTHING(cudaHostUnregister)
NOTHING(cudaHostAlloc)
NOTHING(cudaFreeHost)
NOTHING(cudaMalloc)
NOTHING(cudaFree)
NOTHING(cudaMemGetInfo)
NOTHING(cudaMemcpyAsync)
NOTHING(cudaStreamCreateWithFlags)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord)
NOTHING(cudaEventQuery)
NOTHING(cudaEventSynchronize)
NOTHING(cudaSetDevice)
NOTHING(cudaGetDevice)
NOTHING(cudaGetDeviceCount)
NOTHING(cudaGetLastError)

EXPORT int cudaEventCreateWithFlags(void **event, unsigned flags) {
    (void)flags;
    *event = event; /* any number but 0 */
    return 0;
}

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 0;
    return 0;
}

EXPORT const char *cudaGetErrorString(int code) {
    (void)code;
    return "nothing";
}
