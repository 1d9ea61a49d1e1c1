// The vocoder's kernels for Python: checks tensors, launches on the current stream, so that a CUDA graph can record them.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <optional>

#include "vocoder.h"

namespace {

using torch::Tensor;
using Maybe = std::optional<Tensor>;

template <class T = float>
T* data(const Tensor& t, int64_t least, const char* name) {
  TORCH_CHECK(t.is_cuda() && t.is_contiguous() && t.scalar_type() == c10::CppTypeToScalarType<T>::value, name, ": wrong device, layout or dtype");
  TORCH_CHECK(t.numel() >= least, name, ": expected at least ", least, " values, got ", t.numel());
  return t.data_ptr<T>();
}
float* maybe(const Maybe& t, int64_t least, const char* name) { return t ? data(*t, least, name) : nullptr; }

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}
// The current stream of a tensor's device.
cudaStream_t stream_of(const Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.device().index()); }

qmk::History history(const Tensor& fresh, const Maybe& past, const Tensor& slots, int64_t streams, int64_t rows, int64_t channels) {
  const int64_t kept = past ? past->size(1) : 0;
  if (past) TORCH_CHECK(past->dim() == 3 && past->size(2) == channels, "past must be [slots, kept, ", channels, "]");
  return {data(fresh, streams * rows * channels, "fresh"), past ? data(*past, 1, "past") : nullptr, data<int>(slots, streams, "slots"),
          static_cast<int>(streams), static_cast<int>(rows), static_cast<int>(kept), static_cast<int>(channels)};
}

void convolve(const Tensor& fresh, const Maybe& past, const Tensor& slots, int64_t streams, int64_t rows, int64_t dilation,
              const Tensor& weight, const Tensor& bias, const Maybe& residual, const Maybe& out, const Maybe& activated,
              int64_t activation, const Maybe& frequency, const Maybe& scale, bool exact, double rms_eps) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  TORCH_CHECK(weight.dim() == 3, "weight must be [taps, channels, columns]");
  const int64_t taps = weight.size(0), channels = weight.size(1), columns = weight.size(2), values = streams * rows * columns;
  qmk::Convolution c{};
  c.in = history(fresh, past, slots, streams, rows, channels);
  TORCH_CHECK(c.in.kept == (taps - 1) * dilation, "the past must be ", (taps - 1) * dilation, " rows, got ", c.in.kept);
  TORCH_CHECK(channels % 32 == 0 && columns % 32 == 0, "channels and columns must be multiples of 32, got ", channels, " and ", columns);
  c.taps = static_cast<int>(taps);
  c.dilation = static_cast<int>(dilation);
  c.weight = data(weight, 1, "weight");
  c.bias = data(bias, columns, "bias");
  c.columns = static_cast<int>(columns);
  c.residual = maybe(residual, values, "residual");
  c.out = maybe(out, values, "out");
  c.activation = static_cast<qmk::Activation>(activation);
  c.activated = maybe(activated, c.activation == qmk::Activation::kGate ? values / 2 : values, "activated");
  if (c.activation == qmk::Activation::kSnake) {
    TORCH_CHECK(frequency && scale, "SnakeBeta needs its factors");
    c.channels_out = static_cast<int>(frequency->numel());
    c.frequency = data(*frequency, 1, "frequency");
    c.scale = data(*scale, c.channels_out, "scale");
  }
  c.exact = exact;
  c.rms_eps = static_cast<float>(rms_eps);
  TORCH_CHECK(!c.rms_eps || (taps == 1 && !past), "only single rows are normalised");
  check(qmk::convolve(c, stream_of(fresh)));
}

void sum_codebooks(const Tensor& codes, const Tensor& table, int64_t rows, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(codes.device());
  check(qmk::sum_codebooks(data<int>(codes, rows * table.size(0), "codes"), data(table, 1, "table"), static_cast<int>(rows),
                           static_cast<int>(table.size(0)), static_cast<int>(table.size(1)), static_cast<int>(table.size(2)),
                           data(out, rows * table.size(2), "out"), stream_of(codes)));
}

void depthwise_norm(const Tensor& fresh, const Tensor& past, const Tensor& slots, int64_t streams, int64_t rows, const Tensor& weight,
                    const Tensor& bias, const Tensor& gain, const Tensor& shift, double eps, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  const int64_t channels = weight.size(1);
  check(qmk::depthwise_norm(history(fresh, past, slots, streams, rows, channels), data(weight, 7 * channels, "weight"),
                            data(bias, channels, "bias"), data(gain, channels, "gain"), data(shift, channels, "shift"),
                            static_cast<float>(eps), data(out, streams * rows * channels, "out"), stream_of(fresh)));
}

void attend(const Tensor& qkv, const Tensor& keys, const Tensor& values, const Tensor& slots, const Tensor& position, const Tensor& inv_freq,
            int64_t streams, int64_t rows, int64_t window, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(qkv.device());
  const int64_t heads = keys.size(1), ring = keys.size(2), dim = keys.size(3), width = heads * dim;
  check(qmk::attend({data(qkv, streams * rows * 3 * width, "qkv"), data(keys, 1, "keys"), data(values, keys.numel(), "values"),
                     data<int>(slots, streams, "slots"), data<int64_t>(position, keys.size(0), "position"), data(inv_freq, dim / 2, "inv_freq"),
                     static_cast<int>(streams), static_cast<int>(rows), static_cast<int>(heads), static_cast<int>(dim), static_cast<int>(ring),
                     static_cast<int>(window), data(out, streams * rows * width, "out")},
                    stream_of(qkv)));
}

void convolve_to_sound(const Tensor& fresh, const Tensor& past, const Tensor& slots, int64_t streams, int64_t rows, const Tensor& weight,
                       const Tensor& bias, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  check(qmk::convolve_to_sound(history(fresh, past, slots, streams, rows, weight.size(1)), data(weight, 7 * weight.size(1), "weight"),
                               data(bias, 1, "bias"), data(out, streams * rows, "out"), stream_of(fresh)));
}

// (fresh, past, rows) of every history, as bytes on the device for keep_histories.
Tensor list_histories(const std::vector<std::tuple<Tensor, Tensor, int64_t>>& histories) {
  Tensor list = torch::empty({static_cast<int64_t>(histories.size() * sizeof(qmk::Kept))}, torch::kUInt8);
  auto* kept = reinterpret_cast<qmk::Kept*>(list.data_ptr<uint8_t>());
  for (const auto& [fresh, past, rows] : histories)
    *kept++ = {data(fresh, 1, "fresh"), data(past, 1, "past"), static_cast<int32_t>(rows), static_cast<int32_t>(past.size(1)),
               static_cast<int32_t>(past.size(2)), 0};
  return list.to(std::get<0>(histories.at(0)).device());
}

void keep_histories(const Tensor& list, int64_t widest, const Tensor& slots, const Tensor& position, int64_t streams, int64_t frames) {
  const c10::cuda::CUDAGuard guard(list.device());
  check(qmk::keep_histories(reinterpret_cast<const qmk::Kept*>(data<uint8_t>(list, 1, "list")),
                            static_cast<int>(list.numel() / sizeof(qmk::Kept)), static_cast<int>(widest), data<int>(slots, streams, "slots"),
                            data<int64_t>(position, 1, "position"), static_cast<int>(streams), static_cast<int>(frames), stream_of(list)));
}

}  // namespace

void bind_vocoder(pybind11::module_& m) {
  m.def("convolve", &convolve);
  m.def("sum_codebooks", &sum_codebooks);
  m.def("depthwise_norm", &depthwise_norm);
  m.def("attend", &attend);
  m.def("convolve_to_sound", &convolve_to_sound);
  m.def("list_histories", &list_histories);
  m.def("keep_histories", &keep_histories);
}
