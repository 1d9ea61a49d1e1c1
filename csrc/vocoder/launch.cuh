// How the vocoder's kernels follow each other: launches that overlap where the architecture can, and clusters.
#pragma once
#include <cuda_runtime.h>

#include <utility>

namespace qmk {

// A kernel may begin while the one before it ends. It fetches weights, then waits here for all results of earlier
// kernels.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  // Only now may the next one begin. A chain of waiting kernels would take the room of the one that works.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Can a kernel use clusters, and launches that overlap? It depends on what it was compiled for: code of an older
// architecture has neither, whatever the card.
template <class Kernel>
bool has_clusters(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_after(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream,
                         dim3 cluster, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (has_clusters(kernel)) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
    config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  }
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace qmk
