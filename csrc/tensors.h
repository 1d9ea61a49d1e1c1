// What every binding does with its tensors: checks them, finds their CUDA stream, tells what CUDA said.
#pragma once
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <string>

#include "message.h"

namespace qmk {

// The data of a contiguous CUDA tensor of a dtype and of at least so many values.
template <class T>
T* data_of(const torch::Tensor& t, const std::string& name, torch::ScalarType dtype, int64_t at_least) {
  TORCH_CHECK(t.is_cuda() && t.is_contiguous() && t.scalar_type() == dtype && t.numel() >= at_least,
              message(name, " must be a contiguous CUDA ", c10::toString(dtype), " tensor of at least ", at_least,
                      " values, got ", t.toString(), " of ", t.numel()));
  return reinterpret_cast<T*>(t.data_ptr());
}

inline void check_cuda(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, message(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

// The current stream of a tensor's device.
inline cudaStream_t stream_of(const torch::Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.device().index()); }

}  // namespace qmk
