// The part of the CUDA runtime (libcudart.so.13) that PyTorch and LMCache's client use before any kernel runs, over the
// driver library that is linked: the fake driver. Preloaded, it answers in place of NVIDIA's, which needs a real driver.
// A launch of a kernel is an error.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread CUcontext current;
static __thread cudaError_t last;

static cudaError_t record(CUresult code) { return code == CUDA_SUCCESS ? cudaSuccess : (last = (cudaError_t)code); }

// The runtime makes the primary context current in each thread that calls it.
static CUresult ready(void) {
  if (current) return CUDA_SUCCESS;
  CUresult code = cuInit(0);
  if (!code) code = cuDevicePrimaryCtxRetain(&current, 0);
  if (!code) code = cuCtxSetCurrent(current);
  return code;
}

#define CALL(...) do { CUresult code = ready(); return record(code ? code : (__VA_ARGS__)); } while (0)

cudaError_t cudaGetDeviceCount(int *n) { CUresult c = cuInit(0); return record(c ? c : cuDeviceGetCount(n)); }
cudaError_t cudaGetDevice(int *d) { *d = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { (void)d; CALL(CUDA_SUCCESS); }
cudaError_t cudaDeviceSynchronize(void) { CALL(cuCtxSynchronize()); }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { (void)a; (void)b; *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *to, int capacity, int d) { CALL(cuDeviceGetPCIBusId(to, capacity, d)); }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { (void)a; (void)d; *v = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { CALL(cuDeviceTotalMem(t, 0) || cuDeviceTotalMem(f, 0)); }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  CUresult code = ready();
  if (code) return record(code);
  memset(p, 0, sizeof *p);
  cuDeviceGetName(p->name, sizeof p->name, d);
  cuDeviceGetUuid_v2((CUuuid *)&p->uuid, d);
  cuDeviceTotalMem(&p->totalGlobalMem, d);
  p->major = 9;
  p->multiProcessorCount = 1;
  p->warpSize = 32;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n) { CALL(cuMemAlloc((CUdeviceptr *)p, n)); }
cudaError_t cudaFree(void *p) { CALL(p ? cuMemFree((CUdeviceptr)p) : CUDA_SUCCESS); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { CALL(cuMemHostAlloc(p, n, f)); }
cudaError_t cudaFreeHost(void *p) { CALL(cuMemFreeHost(p)); }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) {
  (void)k;
  CALL(cuMemcpyAsync((CUdeviceptr)d, (CUdeviceptr)s, n, st));
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
  cudaError_t e = cudaMemcpyAsync(d, s, n, k, 0);
  return e ? e : cudaStreamSynchronize(0);
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) { CALL(cuMemsetD8Async((CUdeviceptr)d, v, n, s)); }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  CUdeviceptr base;
  size_t bytes;
  memset(a, 0, sizeof *a);
  int on_device = !ready() && !cuMemGetAddressRange(&base, &bytes, (CUdeviceptr)p);
  a->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->devicePointer = on_device ? (void *)p : NULL;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { CALL(cuStreamCreateWithPriority(s, f, p)); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { CALL(cuStreamCreate(s, f)); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { CALL(cuStreamDestroy(s)); }
cudaError_t cudaStreamQuery(cudaStream_t s) { CALL(cuStreamQuery(s)); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { CALL(cuStreamSynchronize(s)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { CALL(cuStreamWaitEvent(s, e, f)); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { (void)s; *c = 0; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  (void)s; (void)id; (void)g; (void)d; (void)e; (void)n;
  *c = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { (void)m; return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { CALL(cuEventCreate(e, f)); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { CALL(cuEventDestroy(e)); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { CALL(cuEventRecord(e, s)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { (void)f; CALL(cuEventRecord(e, s)); }
cudaError_t cudaEventQuery(cudaEvent_t e) { CALL(cuEventQuery(e)); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { CALL(cuEventSynchronize(e)); }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) { CALL(cuIpcGetMemHandle((CUipcMemHandle *)h, (CUdeviceptr)p)); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { CALL(cuIpcGetEventHandle((CUipcEventHandle *)h, e)); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
  CUipcEventHandle handle;
  memcpy(&handle, &h, sizeof handle);
  CALL(cuIpcOpenEventHandle(e, handle));
}

cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t e) { const char *s = NULL; cuGetErrorName((CUresult)e, &s); return s ? s : "?"; }
const char *cudaGetErrorString(cudaError_t e) { const char *s = NULL; cuGetErrorString((CUresult)e, &s); return s ? s : "?"; }

// The driver functions that PyTorch wants to have, whether it will call them or not.
static CUresult absent(void) { return CUDA_ERROR_NOT_SUPPORTED; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned v, unsigned long long f,
                                             enum cudaDriverEntryPointQueryResult *found) {
  (void)v; (void)f;
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *to = dlsym(RTLD_DEFAULT, versioned);
  if (!*to) *to = dlsym(RTLD_DEFAULT, name);
  if (!*to) *to = (void *)absent;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Kernels are named at the start and none is ever run.
void **__cudaRegisterFatBinary(void *b) { static void *handle; (void)b; return &handle; }
void __cudaRegisterFatBinaryEnd(void **h) { (void)h; }
void __cudaUnregisterFatBinary(void **h) { (void)h; }
void __cudaRegisterFunction(void **h, const char *f, char *d, const char *n, int l, void *a, void *b, void *c, void *e, int *w) {
  (void)h; (void)f; (void)d; (void)n; (void)l; (void)a; (void)b; (void)c; (void)e; (void)w;
}
void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {
  (void)h; (void)v; (void)a; (void)n; (void)e; (void)s; (void)c; (void)g;
}
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, struct CUstream_st *s) {
  (void)g; (void)b; (void)m; (void)s;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) {
  *g = *b = (dim3){1, 1, 1};
  *m = 0;
  *(cudaStream_t *)s = NULL;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  (void)f; (void)g; (void)b; (void)a; (void)m; (void)s;
  return last = cudaErrorNotSupported;
}
// What a launch is compiled to since CUDA 13.
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  (void)f; (void)g; (void)b; (void)a; (void)m; (void)s;
  return last = cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  (void)c; (void)f; (void)a;
  return last = cudaErrorNotSupported;
}

// The management library (libnvidia-ml.so.1), which PyTorch asks, before it makes expandable segments, whether the GPU is
// part of a fabric: it is not.
static int unsupported(void) { return 3; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **to) { (void)bus; *to = NULL; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void) { return unsupported(); }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return unsupported(); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return unsupported(); }
int nvmlDeviceGetComputeRunningProcesses(void) { return unsupported(); }
int nvmlSystemGetCudaDriverVersion_v2(void) { return unsupported(); }
