// The CUDA runtime without a GPU, to be loaded before torch (LD_PRELOAD). Device memory is memory of the host, what is
// queued is done at once, kernels are counted and not run, and a capture keeps what it may keep and replays it. All that
// torch does on the host stays torch's own: caching allocator, pinned memory, streams, events, threads of autograd,
// sync debug mode, the rules of a capture. Values come from `emulation.py`.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <mutex>
#include <vector>

namespace {

// -- what is counted, for tests -----------------------------------------------------------------------------------------

std::atomic<long> launches{0}, copies{0}, host_copies{0}, waits{0}, device_allocations{0}, pinned_allocations{0};

// -- memory -------------------------------------------------------------------------------------------------------------

enum class Place { Nowhere, Pinned, Device };
struct Block {
  size_t size;
  Place place;
};
std::mutex guard;
std::map<const char*, Block> blocks;
constexpr size_t kAlignment = 512;  // as cudaMalloc has it

cudaError_t allocate(void** address, size_t size, Place place) {
  if (posix_memalign(address, kAlignment, size ? size : kAlignment)) return cudaErrorMemoryAllocation;
  memset(*address, 0xFF, size);  // whoever reads what nobody wrote finds NaN
  std::lock_guard<std::mutex> held(guard);
  blocks[static_cast<const char*>(*address)] = {size, place};
  return cudaSuccess;
}

cudaError_t release(void* address) {
  {
    std::lock_guard<std::mutex> held(guard);
    blocks.erase(static_cast<const char*>(address));
  }
  free(address);
  return cudaSuccess;
}

Place place_of(const void* address) {
  std::lock_guard<std::mutex> held(guard);
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return Place::Nowhere;
  auto& [start, block] = *std::prev(after);
  return static_cast<const char*>(address) < start + block.size ? block.place : Place::Nowhere;
}

// -- captures -----------------------------------------------------------------------------------------------------------

struct Operation {  // a copy, or where there is no source a fill
  void* target;
  const void* source;
  size_t size;
  int value;
};
struct Graph {
  std::vector<Operation> operations;
  long kernels = 0;
};
Graph* capture = nullptr;  // one at a time
std::set<cudaStream_t> capture_streams;  // where it began, and those that have waited for one of these since
cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
unsigned long long captures = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

bool captures_on(cudaStream_t stream) { return capture && capture_streams.count(stream); }

// What could wait for the device, or take memory, is forbidden while a stream captures, unless the thread is relaxed.
bool is_forbidden() {
  return capture && thread_mode != cudaStreamCaptureModeRelaxed && capture_mode != cudaStreamCaptureModeRelaxed;
}

cudaError_t refuse() { return last_error = cudaErrorStreamCaptureUnsupported; }

cudaError_t wait(bool refused) {
  if (refused) return refuse();
  ++waits;
  return cudaSuccess;
}

cudaError_t move(const Operation& operation, cudaStream_t stream) {
  if (captures_on(stream)) {
    capture->operations.push_back(operation);
    return cudaSuccess;
  }
  if (operation.source)
    memmove(operation.target, operation.source, operation.size);
  else
    memset(operation.target, operation.value, operation.size);
  return cudaSuccess;
}

cudaError_t launch(cudaStream_t stream) {
  ++launches;
  if (captures_on(stream)) ++capture->kernels;
  return cudaSuccess;
}

CUresult primary_context(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult any_driver_function() { return CUDA_SUCCESS; }

}  // namespace

extern "C" {

void nullgpu_launch(cudaStream_t stream) { launch(stream); }
long nullgpu_launches() { return launches; }
long nullgpu_copies() { return copies; }
long nullgpu_host_copies() { return host_copies; }
long nullgpu_waits() { return waits; }
long nullgpu_device_allocations() { return device_allocations; }
long nullgpu_pinned_allocations() { return pinned_allocations; }

// -- forks --------------------------------------------------------------------------------------------------------------

// torch refuses CUDA in a fork of a process that has used it, which it knows by a handler. Memory of the host survives.
int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* library) {
  Dl_info info;
  auto is_torchs = !prepare && !parent && dladdr(reinterpret_cast<void*>(child), &info) && strstr(info.dli_fname, "libtorch");
  auto next = reinterpret_cast<decltype(&__register_atfork)>(dlsym(RTLD_NEXT, "__register_atfork"));
  return is_torchs ? 0 : next(prepare, parent, child, library);
}

// -- the device ---------------------------------------------------------------------------------------------------------

constexpr int kProcessors = 132;

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : last_error = cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return wait(capture != nullptr); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int) {
  snprintf(name, size, "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = kProcessors;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  strcpy(properties->name, "emulated device");
  properties->major = 9;
  properties->multiProcessorCount = kProcessors;
  properties->warpSize = 32;
  properties->totalGlobalMem = size_t{80} << 30;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 0xffff;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->textureAlignment = kAlignment;
  properties->unifiedAddressing = properties->canMapHostMemory = 1;
  return cudaSuccess;
}

// -- errors -------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorStreamCaptureUnsupported ? "cudaErrorStreamCaptureUnsupported" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  if (error == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing";
  snprintf(text, sizeof text, "error %d of the emulated device", int(error));
  return text;
}

// -- memory -------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** address, size_t size) {
  if (is_forbidden()) return refuse();
  ++device_allocations;
  return allocate(address, size, Place::Device);
}
cudaError_t cudaFree(void* address) { return release(address); }
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  if (is_forbidden()) return refuse();
  ++pinned_allocations;
  return allocate(address, size, Place::Pinned);
}
cudaError_t cudaFreeHost(void* address) { return release(address); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = size_t{80} << 30;
  *free_bytes = size_t{70} << 30;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  switch (place_of(address)) {
    case Place::Device: attributes->type = cudaMemoryTypeDevice; break;
    case Place::Pinned: attributes->type = cudaMemoryTypeHost; break;
    default: attributes->type = cudaMemoryTypeUnregistered;
  }
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  ++copies;
  if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost) ++host_copies;
  return move({target, source, size, 0}, stream);
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  if (is_forbidden()) return refuse();
  ++copies, ++waits;
  return move({target, source, size, 0}, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  return move({target, nullptr, size, value}, stream);
}
cudaError_t cudaMemset(void* target, int value, size_t size) { return move({target, nullptr, size, value}, nullptr); }
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char room[1 << 16];
  return *address = room, cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// -- streams and events: what is queued has been done ---------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static std::atomic<uintptr_t> next{0x1000};
  return *stream = reinterpret_cast<cudaStream_t>(next += 16), cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return captures_on(stream) ? refuse() : cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait(captures_on(stream) || is_forbidden()); }
// What an event knows: the number of the capture that it was recorded in, 0 for none.
unsigned long long& capture_of(cudaEvent_t event) { return *reinterpret_cast<unsigned long long*>(event); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (captures_on(stream) && capture_of(event) != captures) return last_error = cudaErrorStreamCaptureIsolation;
  if (capture && capture_of(event) == captures) capture_streams.insert(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = static_cast<cudaEvent_t>(calloc(1, sizeof(unsigned long long))), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return is_forbidden() ? refuse() : cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return capture_of(event) = captures_on(stream) ? captures : 0, cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(capture != nullptr); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}

// -- kernels --------------------------------------------------------------------------------------------------------------

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local Configuration configuration;

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch(stream); }
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch(stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* given, const void*, void**) { return launch(given->stream); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = 4, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  bool is_context = !strcmp(name, "cuDevicePrimaryCtxGetState");
  *function = is_context ? reinterpret_cast<void*>(primary_context) : reinterpret_cast<void*>(any_driver_function);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// -- graphs ---------------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (capture) return refuse();
  capture = new Graph;
  capture_streams = {stream};
  capture_mode = mode;
  ++captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(capture);
  capture = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captures_on(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  if (number) *number = captures;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(capture);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return *executable = reinterpret_cast<cudaGraphExec_t>(graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  auto graph = reinterpret_cast<Graph*>(executable);
  for (auto& operation : graph->operations) move(operation, nullptr);
  launches += graph->kernels;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  auto captured = reinterpret_cast<Graph*>(graph);
  return *count = captured->operations.size() + captured->kernels, cudaSuccess;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  return *count = 0, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
