// csrc/cuda/masked_cross_entropy.cu on the emulated threads, as torch.ops.fastenc_emulated, for CPU tensors.
#include <torch/csrc/stable/library.h>

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) _STABLE_TORCH_LIBRARY_IMPL(fastenc_emulated, CPU, m, C10_UID)

#include "cuda/masked_cross_entropy.cu"

// What a torch with CUDA has of its stable interface.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return TORCH_SUCCESS;
}
AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool, char** message) {
  *message = nullptr;
  return TORCH_SUCCESS;
}
void torch_c10_cuda_free_error_msg(char*) {}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return TORCH_SUCCESS; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return TORCH_SUCCESS; }

__attribute__((visibility("default"))) void emulate_architecture(unsigned architecture) { emulation::architecture = architecture; }
__attribute__((visibility("default"))) unsigned threads_of_last_launch() { return emulation::threads_of_last_launch; }
}
