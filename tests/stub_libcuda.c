// A libcuda.so.1 whose calls do nothing and succeed: Triton's own launcher runs over it on a machine without a GPU, so
// that what the launch path passes, and what it costs the host, can be tested there. It keeps the last launch.
#include <stdint.h>
#include <string.h>

#define DEVICE_ATTRIBUTE_WARP_SIZE 10
#define DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_OPTIN 97
#define FUNC_ATTRIBUTE_MAX_THREADS 0
#define FUNC_ATTRIBUTE_NUM_REGS 4
#define MAX_PARAMS 32

#define LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION 6

typedef struct {  // CUlaunchAttribute
  int id, unused, value;
  char rest[60];
} Attribute;

typedef struct {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void *stream;
  const Attribute *attributes;
  unsigned n_attributes;
} Config;

long stub_launches, stub_modules;
int stub_n_params;  // how many arguments to keep; the driver API does not say how many there are
uint64_t stub_params[MAX_PARAMS], stub_function, stub_stream, stub_context;
unsigned stub_grid[3], stub_block[3];
int stub_overlaps;  // whether the launch may begin before the one before it has ended
static _Thread_local void *current;  // the thread's context: the device's index + 1

int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  (void)extra;
  __atomic_add_fetch(&stub_launches, 1, __ATOMIC_RELAXED);
  memcpy(stub_grid, config->grid, sizeof stub_grid);
  memcpy(stub_block, config->block, sizeof stub_block);
  stub_function = (uint64_t)function;
  stub_stream = (uint64_t)config->stream;
  stub_context = (uint64_t)current;
  stub_overlaps = 0;
  for (unsigned i = 0; i < config->n_attributes; ++i)
    if (config->attributes[i].id == LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      stub_overlaps = config->attributes[i].value;
  for (int i = 0; i < stub_n_params && i < MAX_PARAMS; ++i) memcpy(&stub_params[i], params[i], sizeof stub_params[i]);
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  (void)image;
  *module = (void *)__atomic_add_fetch(&stub_modules, 1, __ATOMIC_RELAXED);
  return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)name;
  *function = (void *)(0x1000 + (uint64_t)module);  // one function a module, so that a handle tells which was launched
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  (void)function;
  *value = attribute == FUNC_ATTRIBUTE_MAX_THREADS ? 1024 : attribute == FUNC_ATTRIBUTE_NUM_REGS ? 40 : 0;
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == DEVICE_ATTRIBUTE_WARP_SIZE                 ? 32
           : attribute == DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_OPTIN ? 232448
                                                                   : 132;
  return 0;
}
int cuCtxGetCurrent(void **context) { return *context = current, 0; }
int cuCtxSetCurrent(void *context) { return current = context, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uint64_t)(device + 1), 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDriverGetVersion(int *version) { return *version = 12080, 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) {
  (void)attribute;
  return *value = pointer, 0;
}
int cuGetErrorString(int error, const char **text) {
  (void)error;
  return *text = "the stub driver fails nothing", 0;
}
int cuStreamIsCapturing(void *stream, int *status) {
  (void)stream;
  return *status = 0, 0;
}
int cuInit(unsigned flags) { return (void)flags, 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return (void)function, (void)attribute, (void)value, 0; }
int cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, 0; }
int cuModuleUnload(void *module) { return (void)module, 0; }
int cuCtxGetLimit(uint64_t *value, int limit) { return (void)limit, *value = 0, 0; }
int cuCtxSetLimit(int limit, uint64_t value) { return (void)limit, (void)value, 0; }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  return (void)function, (void)config, *clusters = 1, 0;
}
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
