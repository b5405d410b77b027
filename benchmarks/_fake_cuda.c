// A libcuda.so.1 for benchmarks/_dry_run.py: it starts nothing, and notes each launch as a line of JSON in the file
// that FAKE_CUDA_LOG names. Sizes of a kernel's parameters are read from its binary, as the driver reads them.
#include <cuda.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int count, sizes[256];
  char name[256];
} Kernel;

static CUcontext current = (CUcontext)0x1;

static FILE* notes(void) {
  static FILE* file = NULL;
  if (!file) {
    const char* path = getenv("FAKE_CUDA_LOG");
    file = path ? fopen(path, "a") : stderr;
    setvbuf(file, NULL, _IOLBF, 0);
  }
  return file;
}

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, 0; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, 0; }
CUresult cuDeviceGet(CUdevice* device, int index) { return *device = index, 0; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, 0; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return *context = (CUcontext)0x1, 0; }
CUresult cuGetErrorString(CUresult error, const char** text) { return *text = "an error of the fake driver", 0; }
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return *value = 0, 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) { return *status = 0, 0; }
CUresult cuModuleUnload(CUmodule module) { return 0; }
CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction kernel, CUfunc_cache config) { return 0; }
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr*)data = pointer, 0;
}
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction kernel, const CUlaunchConfig* config) {
  return *count = 1, 0;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {  // an H200's
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    default: *value = 1;
  }
  return 0;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return *module = (CUmodule)image, 0; }

// EIATTR_KPARAM_INFO records (format 4, attribute 0x17) of the section .nv.info.<kernel>.
static void read_parameters(Kernel* kernel, const unsigned char* image) {
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)image;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(image + header->e_shoff);
  const char* names = (const char*)image + sections[header->e_shstrndx].sh_offset;
  char wanted[300];
  snprintf(wanted, sizeof wanted, ".nv.info.%s", kernel->name);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (strcmp(names + sections[i].sh_name, wanted)) continue;
    const unsigned char* at = image + sections[i].sh_offset;
    const unsigned char* end = at + sections[i].sh_size;
    while (at < end) {
      uint16_t size = *(const uint16_t*)(at + 2);
      if (at[0] == 4 && at[1] == 0x17) {
        uint16_t ordinal = *(const uint16_t*)(at + 8);
        kernel->sizes[ordinal] = *(const uint32_t*)(at + 12) >> 18;
        if (ordinal + 1 > kernel->count) kernel->count = ordinal + 1;
      }
      at += 4 + (at[0] == 4 ? size : 0);
    }
  }
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Kernel* kernel = calloc(1, sizeof *kernel);
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  read_parameters(kernel, (const unsigned char*)module);
  *function = (CUfunction)kernel;
  return 0;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction kernel) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  const Kernel* kernel = (const Kernel*)function;
  fprintf(notes(), "{\"kernel\": \"%s\", \"function\": %llu, \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %u, \"parameters\": [",
          kernel->name, (unsigned long long)function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
          config->sharedMemBytes);
  for (int i = 0; i < kernel->count; ++i) {
    uint64_t value = 0;
    memcpy(&value, parameters[i], kernel->sizes[i] > 8 ? 8 : kernel->sizes[i]);
    fprintf(notes(), "%s[%d, %llu]", i ? ", " : "", kernel->sizes[i], (unsigned long long)value);
  }
  fprintf(notes(), "]}\n");
  return 0;
}
