/* The same runtime under HIP's names, so that what binds libamdhip64 can be tested. The codes of errors are the same in both.
 *
 * Attributes have HIP's own numbers, which are not CUDA's. Not simulated: what ROCm does differently with file mappings.
 */
#include "simulation.h"

cudaError_t cudaHostRegister(void *, size_t, unsigned), cudaHostUnregister(void *), cudaHostAlloc(void **, size_t, unsigned);
cudaError_t cudaFreeHost(void *), cudaHostGetFlags(unsigned *, void *), cudaMalloc(void **, size_t), cudaFree(void *);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *, const void *), cudaMemGetInfo(size_t *, size_t *);
cudaError_t cudaMallocAsync(void **, size_t, cudaStream_t), cudaFreeAsync(void *, cudaStream_t);
cudaError_t cudaMemcpyAsync(void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemcpy(void *, const void *, size_t, enum cudaMemcpyKind), cudaMemset(void *, int, size_t);
cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t), cudaStreamCreate(cudaStream_t *);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned), cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t), cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned), cudaEventCreate(cudaEvent_t *);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned), cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t), cudaEventQuery(cudaEvent_t), cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t), cudaSetDevice(int), cudaGetDevice(int *);
cudaError_t cudaGetDeviceCount(int *), cudaDeviceGetAttribute(int *, enum cudaDeviceAttr, int);
cudaError_t cudaDeviceGetPCIBusId(char *, int, int), cudaDeviceSynchronize(void), cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void), cudaRuntimeGetVersion(int *), cudaDriverGetVersion(int *);
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t, void *);
const char *cudaGetErrorString(cudaError_t), *cudaGetErrorName(cudaError_t);

#define AS(hip, cuda, parameters, arguments)                                                                                     \
    EXPORT cudaError_t hip parameters;                                                                                           \
    EXPORT cudaError_t hip parameters { return cuda arguments; }

AS(hipHostRegister, cudaHostRegister, (void *a, size_t b, unsigned c), (a, b, c))
AS(hipHostUnregister, cudaHostUnregister, (void *a), (a))
AS(hipHostMalloc, cudaHostAlloc, (void **a, size_t b, unsigned c), (a, b, c))
AS(hipHostAlloc, cudaHostAlloc, (void **a, size_t b, unsigned c), (a, b, c))
AS(hipHostFree, cudaFreeHost, (void *a), (a))
AS(hipHostGetFlags, cudaHostGetFlags, (unsigned *a, void *b), (a, b))
AS(hipPointerGetAttributes, cudaPointerGetAttributes, (struct cudaPointerAttributes *a, const void *b), (a, b))
AS(hipMalloc, cudaMalloc, (void **a, size_t b), (a, b))
AS(hipFree, cudaFree, (void *a), (a))
AS(hipMallocAsync, cudaMallocAsync, (void **a, size_t b, cudaStream_t c), (a, b, c))
AS(hipFreeAsync, cudaFreeAsync, (void *a, cudaStream_t b), (a, b))
AS(hipMemGetInfo, cudaMemGetInfo, (size_t *a, size_t *b), (a, b))
AS(hipMemcpyAsync, cudaMemcpyAsync, (void *a, const void *b, size_t c, enum cudaMemcpyKind d, cudaStream_t e), (a, b, c, d, e))
AS(hipMemcpy, cudaMemcpy, (void *a, const void *b, size_t c, enum cudaMemcpyKind d), (a, b, c, d))
AS(hipMemset, cudaMemset, (void *a, int b, size_t c), (a, b, c))
AS(hipMemsetAsync, cudaMemsetAsync, (void *a, int b, size_t c, cudaStream_t d), (a, b, c, d))
AS(hipStreamCreate, cudaStreamCreate, (cudaStream_t *a), (a))
AS(hipStreamCreateWithFlags, cudaStreamCreateWithFlags, (cudaStream_t *a, unsigned b), (a, b))
AS(hipStreamDestroy, cudaStreamDestroy, (cudaStream_t a), (a))
AS(hipStreamSynchronize, cudaStreamSynchronize, (cudaStream_t a), (a))
AS(hipStreamQuery, cudaStreamQuery, (cudaStream_t a), (a))
AS(hipStreamWaitEvent, cudaStreamWaitEvent, (cudaStream_t a, cudaEvent_t b, unsigned c), (a, b, c))
AS(hipEventCreate, cudaEventCreate, (cudaEvent_t *a), (a))
AS(hipEventCreateWithFlags, cudaEventCreateWithFlags, (cudaEvent_t *a, unsigned b), (a, b))
AS(hipEventDestroy, cudaEventDestroy, (cudaEvent_t a), (a))
AS(hipEventRecord, cudaEventRecord, (cudaEvent_t a, cudaStream_t b), (a, b))
AS(hipEventQuery, cudaEventQuery, (cudaEvent_t a), (a))
AS(hipEventSynchronize, cudaEventSynchronize, (cudaEvent_t a), (a))
AS(hipEventElapsedTime, cudaEventElapsedTime, (float *a, cudaEvent_t b, cudaEvent_t c), (a, b, c))
AS(hipSetDevice, cudaSetDevice, (int a), (a))
AS(hipGetDevice, cudaGetDevice, (int *a), (a))
AS(hipGetDeviceCount, cudaGetDeviceCount, (int *a), (a))
AS(hipDeviceGetPCIBusId, cudaDeviceGetPCIBusId, (char *a, int b, int c), (a, b, c))
AS(hipDeviceSynchronize, cudaDeviceSynchronize, (void), ())
AS(hipGetLastError, cudaGetLastError, (void), ())
AS(hipPeekAtLastError, cudaPeekAtLastError, (void), ())
AS(hipRuntimeGetVersion, cudaRuntimeGetVersion, (int *a), (a))
AS(hipDriverGetVersion, cudaDriverGetVersion, (int *a), (a))
AS(hipLaunchHostFunc, cudaLaunchHostFunc, (cudaStream_t a, cudaHostFn_t b, void *c), (a, b, c))

/* Numbers of hipDeviceAttribute_t as in ROCm 6, read in bindings generated from its header. */
static const struct {
    int hip;
    enum cudaDeviceAttr cuda;
} attributes[] = {
    {2, cudaDevAttrAsyncEngineCount},
    {66, cudaDevAttrPageableMemoryAccessUsesHostPageTables},
    {67, cudaDevAttrPciBusId},
    {68, cudaDevAttrPciDeviceId},
    {69, cudaDevAttrPciDomainId},
};

EXPORT cudaError_t hipDeviceGetAttribute(int *value, int attribute, int device);
EXPORT cudaError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
    int translated = -1; /* unknown to both */
    for (size_t index = 0; index < sizeof attributes / sizeof *attributes; index++)
        if (attributes[index].hip == attribute) translated = attributes[index].cuda;
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)translated, device);
}

EXPORT const char *hipGetErrorString(cudaError_t error);
EXPORT const char *hipGetErrorString(cudaError_t error) { return cudaGetErrorString(error); }
EXPORT const char *hipGetErrorName(cudaError_t error);
EXPORT const char *hipGetErrorName(cudaError_t error) { return cudaGetErrorName(error); }
