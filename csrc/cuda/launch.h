// Launching a kernel on torch's current stream of a tensor's device, through the stable ABI.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

namespace fastenc::cuda {

// `cluster` consecutive blocks form a thread-block cluster; 1: no clusters.
template <class... Parameters, class... Arguments>
void launch(
    const torch::stable::Tensor& on, void (*kernel)(Parameters...), int64_t blocks, int threads, int cluster,
    Arguments... arguments) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Whether this kernel may use clusters on the device. PTX for an older architecture, which the driver compiled for a
// newer GPU, may not.
template <class... Parameters>
bool has_clusters(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes{};
  STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion >= 90;
}

}  // namespace fastenc::cuda
