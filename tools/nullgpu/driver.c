/* libcuda.so.1 for the emulated device: torch and Triton look these up by name. Nothing of it runs a kernel. */

typedef int Result; /* CUresult: 0 is success */

Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Result cuDeviceGetCount(int *count) { return *count = 1, 0; }
Result cuDeviceGet(int *device, int number) { return *device = number, 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) { /* of an H100, as Triton asks for them */
    case 1: return *value = 1024, 0;       /* threads of a block */
    case 10: return *value = 32, 0;        /* threads of a warp */
    case 12: return *value = 65536, 0;     /* registers of a block */
    case 16: return *value = 132, 0;       /* multiprocessors */
    case 75: return *value = 9, 0;         /* major compute capability */
    case 81: return *value = 228 << 10, 0; /* shared memory of a multiprocessor */
    case 97: return *value = 227 << 10, 0; /* the most shared memory of a block */
    default: return *value = 0, 0;
  }
}
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, 0; }
Result cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) {
  return *value = attribute == 0 ? 1024 : 0, 0; /* threads of a block */
}

/* Triton's launches: counted, and captured, by the runtime, as torch's own are. */
void nullgpu_launch(void *stream);
struct Launch { /* the start of CUlaunchConfig */
  unsigned grid[3], block[3], shared;
  void *stream;
};
Result cuLaunchKernelEx(const struct Launch *given) { return nullgpu_launch(given->stream), 0; }
Result cuLaunchKernel(
    void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream
) {
  return nullgpu_launch(stream), 0;
}

#define DOES_NOTHING(name) \
  Result name(void) { return 0; }
DOES_NOTHING(cuInit)
DOES_NOTHING(cuGetErrorName)
DOES_NOTHING(cuGetErrorString)
DOES_NOTHING(cuCtxGetLimit)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuDeviceGetUuid)
DOES_NOTHING(cuPointerGetAttribute)
DOES_NOTHING(cuMemGetAddressRange_v2)
DOES_NOTHING(cuMemsetD32Async)
DOES_NOTHING(cuModuleLoad)
DOES_NOTHING(cuModuleLoadData)
DOES_NOTHING(cuModuleLoadDataEx)
DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuModuleGetGlobal_v2)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuLibraryLoadData)
DOES_NOTHING(cuLibraryGetKernel)
DOES_NOTHING(cuLinkCreate_v2)
DOES_NOTHING(cuLinkAddData_v2)
DOES_NOTHING(cuLinkComplete)
DOES_NOTHING(cuLinkDestroy)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuLaunchCooperativeKernel)
DOES_NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DOES_NOTHING(cuOccupancyMaxActiveClusters)
DOES_NOTHING(cuStreamGetCaptureInfo_v2)
DOES_NOTHING(cuStreamWriteValue32)
DOES_NOTHING(cuTensorMapEncodeTiled)
