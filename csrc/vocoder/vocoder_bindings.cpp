// The vocoder's kernels for Python: checks tensors, launches on the current stream, so that a CUDA graph can record
// them.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../tensors.h"
#include "vocoder.h"

namespace {

using qmk::message;
using qmk::stream_of;
using torch::Tensor;
using Maybe = std::optional<Tensor>;

template <class T = float>
T* data(const Tensor& t, int64_t least, const char* name) {
  return qmk::data_of<T>(t, name, c10::CppTypeToScalarType<T>::value, least);
}
float* maybe(const Maybe& t, int64_t least, const char* name) { return t ? data(*t, least, name) : nullptr; }
void check(cudaError_t error) { qmk::check_cuda(error, "vocoder"); }

// [slots][...]: every slot's part in one piece, the slots at any distance.
float* of_slots(const Tensor& t, const char* name) {
  TORCH_CHECK(t.numel(), message(name, " must not be empty"));
  return data(t[0], 1, name);
}

qmk::History history(const Tensor& fresh, const Maybe& past, const Tensor& slots, int64_t sequences, int64_t rows,
                     int64_t channels) {
  const int64_t kept = past ? past->size(1) : 0;
  if (past)
    TORCH_CHECK(past->dim() == 3 && past->size(2) == channels, message("past must be [slots, kept, ", channels, "]"));
  return {data(fresh, sequences * rows * channels, "fresh"),
          past ? of_slots(*past, "past") : nullptr,
          past ? past->stride(0) : 0,
          data<int>(slots, sequences, "slots"),
          static_cast<int>(sequences),
          static_cast<int>(rows),
          static_cast<int>(kept),
          static_cast<int>(channels)};
}

void convolve(const Tensor& fresh, const Maybe& past, const Tensor& slots, int64_t sequences, int64_t rows,
              int64_t rows_of_frame, int64_t dilation, const Tensor& weight, const Tensor& bias, const Maybe& residual,
              const Maybe& out, const Maybe& activated, int64_t activation, const Maybe& frequency, const Maybe& scale,
              bool exact) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  TORCH_CHECK(weight.dim() == 4 && weight.size(2) == 2, "weight must be [taps, channels, 2, columns]");
  const int64_t taps = weight.size(0), channels = weight.size(1), columns = weight.size(3),
                values = sequences * rows * columns;
  qmk::Convolution c{};
  c.in = history(fresh, past, slots, sequences, rows, channels);
  TORCH_CHECK(rows_of_frame > 0 && rows % rows_of_frame == 0,
              message("rows must be whole frames of ", rows_of_frame, ", got ", rows));
  c.rows_of_frame = static_cast<int>(rows_of_frame);
  TORCH_CHECK(c.in.kept == (taps - 1) * dilation,
              message("the past must be ", (taps - 1) * dilation, " rows, got ", c.in.kept));
  TORCH_CHECK(
      channels % qmk::kChannelTile == 0 && columns % qmk::kChannelTile == 0,
      message("channels and columns must be multiples of ", qmk::kChannelTile, ", got ", channels, " and ", columns));
  c.taps = static_cast<int>(taps);
  c.dilation = static_cast<int>(dilation);
  c.weight = reinterpret_cast<const uint16_t*>(data<c10::Half>(weight, 1, "weight"));
  c.bias = data(bias, columns, "bias");
  c.columns = static_cast<int>(columns);
  c.residual = maybe(residual, values, "residual");
  c.out = maybe(out, values, "out");
  c.activation = static_cast<qmk::Activation>(activation);
  c.activated = maybe(activated, values, "activated");
  if (c.activation == qmk::Activation::kSnake) {
    TORCH_CHECK(frequency && scale, "SnakeBeta needs frequency and scale");
    c.channels_out = static_cast<int>(frequency->numel());
    c.frequency = data(*frequency, 1, "frequency");
    c.scale = data(*scale, c.channels_out, "scale");
  }
  c.exact = exact;
  check(qmk::convolve(c, stream_of(fresh)));
}

void depthwise_norm(const Tensor& fresh, const Tensor& past, const Tensor& slots, int64_t sequences, int64_t rows,
                    const Tensor& weight, const Tensor& bias, const Tensor& gain, const Tensor& shift, double eps,
                    const Tensor& out) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  const int64_t channels = weight.size(1);
  check(qmk::depthwise_norm(history(fresh, past, slots, sequences, rows, channels),
                            data(weight, 7 * channels, "weight"), data(bias, channels, "bias"),
                            data(gain, channels, "gain"), data(shift, channels, "shift"), static_cast<float>(eps),
                            data(out, sequences * rows * channels, "out"), stream_of(fresh)));
}

// past: of the embeddings, as `history` takes it. tensors: weights, bias_in, bias_out, inv_freq, rings
// [slots][layers][2][heads] [ring][head_dim], position, epoch, fault, and what blocks hand each other (h, qkv,
// attended, gated), int32 [2 * values]; sizes: of the rest of qmk::Layers.
void transform(const Tensor& embedding, const Tensor& past, const Tensor& slots, int64_t sequences, int64_t frames,
               const Tensor& out, const std::map<std::string, Tensor>& tensors,
               const std::map<std::string, int64_t>& sizes, double eps) {
  const c10::cuda::CUDAGuard guard(embedding.device());
  auto size = [&](const char* name) { return static_cast<int>(sizes.at(name)); };
  const Tensor& rings = tensors.at("rings");
  TORCH_CHECK(rings.dim() == 6 && rings.size(2) == 2, "rings must be [slots, layers, 2, heads, ring, head_dim]");
  qmk::Layers p{};
  p.in = history(embedding, past, slots, sequences, frames, past.size(2));
  p.eps = static_cast<float>(eps);
  p.layers = static_cast<int>(rings.size(1)), p.heads = static_cast<int>(rings.size(3)),
  p.ring = static_cast<int>(rings.size(4));
  p.head_dim = static_cast<int>(rings.size(5)), p.blocks = size("blocks"), p.shared_bytes = size("shared_bytes"),
  p.hidden = size("hidden"), p.columns_out = size("columns_out");
  p.intermediate = size("intermediate"), p.window = size("window"),
  p.spin_limit = static_cast<uint32_t>(sizes.at("spin_limit"));
  const int64_t rows = sequences * frames, width = p.heads * p.head_dim;
  auto share = [&](int64_t columns) { return (columns + p.blocks - 1) / p.blocks * p.blocks; };
  const int64_t layer =
      share(3 * width) * p.hidden + share(p.hidden) * (width + p.intermediate) + 2 * share(p.intermediate) * p.hidden;
  p.weights =
      data(tensors.at("weights"),
           qmk::kTransformerTaps * share(p.hidden) * p.in.channels + p.layers * layer + share(p.columns_out) * p.hidden,
           "weights");
  p.bias_in = data(tensors.at("bias_in"), p.hidden, "bias_in");
  p.bias_out = data(tensors.at("bias_out"), p.columns_out, "bias_out");
  p.inv_freq = data(tensors.at("inv_freq"), p.head_dim / 2, "inv_freq");
  p.rings = of_slots(rings, "rings"), p.stride = rings.stride(0);
  p.position = data<int64_t>(tensors.at("position"), rings.size(0), "position");
  p.epoch = reinterpret_cast<uint32_t*>(data<int>(tensors.at("epoch"), 1, "epoch"));
  const Tensor& fault = tensors.at("fault");
  TORCH_CHECK(fault.is_pinned() && fault.scalar_type() == torch::kInt32, "fault must be a pinned int32");
  p.fault = reinterpret_cast<uint32_t*>(fault.data_ptr<int>());
  auto exchange = [&](const char* name, int64_t values) {
    return reinterpret_cast<uint2*>(data<int>(tensors.at(name), 2 * rows * values, name));
  };
  p.h = exchange("h", p.hidden), p.qkv = exchange("qkv", 3 * width);
  p.attended = exchange("attended", width), p.gated = exchange("gated", p.intermediate);
  p.out = data(out, sequences * frames * p.columns_out, "out");
  check(qmk::transform(p, stream_of(embedding)));
}

float** cell(const Tensor& t) { return reinterpret_cast<float**>(data<int64_t>(t, 1, "the PCM's place")); }

void convolve_to_sound(const Tensor& fresh, const Tensor& past, const Tensor& slots, int64_t sequences, int64_t rows,
                       const Tensor& weight, const Tensor& bias, const Tensor& place) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  check(qmk::convolve_to_sound(history(fresh, past, slots, sequences, rows, weight.size(1)),
                               data(weight, 7 * weight.size(1), "weight"), data(bias, 1, "bias"), cell(place),
                               stream_of(fresh)));
}

// histories: (fresh, past, rows).
void keep_histories(const std::vector<std::tuple<Tensor, Tensor, int64_t>>& histories, const Tensor& slots,
                    const Tensor& position, int64_t sequences, int64_t positions) {
  const c10::cuda::CUDAGuard guard(slots.device());
  qmk::Kept p{};
  TORCH_CHECK(!histories.empty() && histories.size() <= std::size(p.of),
              message("expected 1 to ", std::size(p.of), " histories, got ", histories.size()));
  for (const auto& [fresh, past, rows] : histories) {
    p.of[p.count++] = {data(fresh, 1, "fresh"),
                       of_slots(past, "past"),
                       static_cast<int32_t>(rows),
                       static_cast<int32_t>(past.size(1)),
                       static_cast<int32_t>(past.size(2)),
                       static_cast<int32_t>(past.stride(0))};
    p.widest = std::max(p.widest, static_cast<int>(past.size(2)));
  }
  p.sequences = static_cast<int>(sequences), p.positions = static_cast<int>(positions);
  p.slots = data<int>(slots, sequences, "slots"), p.position = data<int64_t>(position, 1, "position");
  check(qmk::keep_histories(p, stream_of(slots)));
}

// A push of some sequences and frames, recorded from the current stream.
class Recording {
 public:
  explicit Recording(const c10::Device& device) : device_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    // Other engines go on using the GPU meanwhile: only this thread's calls may spoil it.
    check(cudaStreamBeginCapture(c10::cuda::getCurrentCUDAStream(device_.index()), cudaStreamCaptureModeThreadLocal));
  }
  ~Recording() {
    if (graph_) cudaGraphExecDestroy(graph_);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void end() {
    const c10::cuda::CUDAGuard guard(device_);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_.index());
    cudaGraph_t recorded = nullptr;
    check(cudaStreamEndCapture(stream, &recorded));
    const cudaError_t error = cudaGraphInstantiate(&graph_, recorded, 0);
    cudaGraphDestroy(recorded);
    check(error);
    check(cudaGraphUpload(graph_, stream));
  }
  // Nothing shall come of it; else the stream would go on recording.
  void abandon() {
    const c10::cuda::CUDAGuard guard(device_);
    cudaGraph_t recorded = nullptr;
    if (cudaStreamEndCapture(c10::cuda::getCurrentCUDAStream(device_.index()), &recorded) == cudaSuccess)
      cudaGraphDestroy(recorded);
  }
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(graph_, stream)); }

 private:
  c10::Device device_;
  cudaGraphExec_t graph_ = nullptr;
};

// Pushes on their way: slots and codes go with a launch, PCM comes back into pinned memory, so that several may be
// queued. Nothing here waits but `collect`.
class Pushes {
 public:
  // table: [groups][size][channels]. What recorded pushes read: slots [kPushSequences], embedding [rows][channels],
  // place int64 [1].
  // unwanted: [rows * samples], where the PCM goes that nobody wants; samples: of a frame; rows: of the largest push,
  // for which there is room.
  Pushes(const Tensor& table, const Tensor& slots, const Tensor& embedding, const Tensor& place, const Tensor& unwanted,
         int64_t samples, int64_t rows)
      : kept_{table, slots, embedding, place, unwanted}, samples_(samples), rows_(rows) {
    TORCH_CHECK(rows > 0 && rows <= qmk::kPushRows, message("expected 1 to ", qmk::kPushRows, " rows, got ", rows));
    TORCH_CHECK(table.dim() == 3 && table.size(0) == qmk::kGroups, "table must be [16, size, channels]");
    inputs_ = {data(table, 1, "table"),
               static_cast<int>(table.size(1)),
               static_cast<int>(table.size(2)),
               data<int>(slots, qmk::kPushSequences, "slots"),
               data(embedding, rows * table.size(2), "embedding"),
               cell(place)};
    unwanted_ = data(unwanted, rows * samples, "unwanted");
    sound_ = torch::empty({qmk::kPushesAhead, rows * samples},
                          torch::TensorOptions().dtype(torch::kFloat32).pinned_memory(true));
    const c10::cuda::CUDAGuard guard(table.device());
    for (auto& event : done_) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  ~Pushes() {
    for (auto& event : done_) {
      cudaEventSynchronize(event);  // the pinned memory must not be given away while somebody writes there
      cudaEventDestroy(event);
    }
  }
  Pushes(const Pushes&) = delete;
  Pushes& operator=(const Pushes&) = delete;

  // Queue a push of host codes int64 [sequences][frames][groups]; its ticket for `collect`, -1 where nobody wants the
  // PCM.
  int64_t launch(const Recording& recording, const std::vector<int64_t>& slots, const Tensor& codes, bool wanted) {
    TORCH_CHECK(codes.is_cpu() && codes.is_contiguous() && codes.scalar_type() == torch::kInt64 && codes.dim() == 3 &&
                    codes.size(0) == static_cast<int64_t>(slots.size()) && codes.size(2) == qmk::kGroups &&
                    codes.numel() <= rows_ * qmk::kGroups,
                message("codes must be contiguous int64 [slots, frames, ", qmk::kGroups, "] on the CPU, of at most ",
                        rows_, " frames in all, got ", codes.toString(), " of ", codes.numel(), " values"));
    qmk::Push push = about(slots, codes.size(1));
    std::copy_n(codes.data_ptr<int64_t>(), codes.numel(), push.codes);
    return launch(recording, push, wanted);
  }
  // Queue a push of the codes that the frame kernel left in `recent` [slots][kRecentFrames][groups], frames first[i]
  // ... of slot i.
  int64_t follow(const Recording& recording, const std::vector<int64_t>& slots, int64_t frames, const Tensor& recent,
                 const std::vector<int64_t>& first) {
    TORCH_CHECK(first.size() == slots.size() && frames <= qmk::kRecentFrames,
                message("expected one first frame a slot, and at most ", qmk::kRecentFrames, " frames, got ",
                        first.size(), " first frames for ", slots.size(), " slots, and ", frames, " frames"));
    qmk::Push push = about(slots, frames);
    for (const int64_t slot : slots)
      TORCH_CHECK(slot >= 0 && slot < recent.size(0), message("slot ", slot, " has no recent codes"));
    push.recent = data<int>(recent, 1, "recent");
    std::copy(first.begin(), first.end(), push.first);
    return launch(recording, push, true);
  }
  // Wait for a push: its PCM, fp32 [sequences][samples].
  Tensor collect(int64_t ticket, int64_t sequences, int64_t frames) const {
    TORCH_CHECK(ticket < launched_ && launched_ - ticket <= qmk::kPushesAhead,
                message("the last ", qmk::kPushesAhead, " of ", launched_, " pushes are kept, got ", ticket));
    check(cudaEventSynchronize(done_[ticket % qmk::kPushesAhead]));
    return sound_[ticket % qmk::kPushesAhead]
        .slice(0, 0, sequences * frames * samples_)
        .view({sequences, frames * samples_})
        .clone();
  }

 private:
  qmk::Push about(const std::vector<int64_t>& slots, int64_t frames) const {
    TORCH_CHECK(!slots.empty() && slots.size() <= qmk::kPushSequences && frames > 0 &&
                    static_cast<int64_t>(slots.size()) * frames <= rows_,
                message("a push takes up to ", qmk::kPushSequences, " sequences and ", rows_, " frames in all, got ",
                        slots.size(), " x ", frames));
    qmk::Push push{};
    push.sequences = static_cast<int>(slots.size());
    push.frames = static_cast<int>(frames);
    std::copy(slots.begin(), slots.end(), push.slot);
    return push;
  }
  int64_t launch(const Recording& recording, qmk::Push& push, bool wanted) {
    const c10::cuda::CUDAGuard guard(kept_[0].device());
    const cudaStream_t stream = stream_of(kept_[0]);
    const int64_t i = launched_ % qmk::kPushesAhead;
    push.sound = wanted ? sound_[i].data_ptr<float>() : unwanted_;
    check(qmk::begin_push(push, inputs_, stream));
    recording.launch(stream);
    if (!wanted) return -1;
    check(cudaEventRecord(done_[i], stream));
    return launched_++;
  }

  std::array<Tensor, 5> kept_;  // as long as the pointers below
  qmk::PushInputs inputs_{};
  float* unwanted_ = nullptr;
  Tensor sound_;
  int64_t samples_, rows_;
  std::array<cudaEvent_t, qmk::kPushesAhead> done_{};
  int64_t launched_ = 0;
};

}  // namespace

void bind_vocoder(pybind11::module_& m) {
  m.def("convolve", &convolve);
  m.def("depthwise_norm", &depthwise_norm);
  m.def("transform", &transform);
  m.def("convolve_to_sound", &convolve_to_sound);
  m.def("keep_histories", &keep_histories);
  pybind11::class_<Recording>(m, "Recording", pybind11::module_local())
      .def(pybind11::init([](const Tensor& on) { return std::make_unique<Recording>(on.device()); }))
      .def("end", &Recording::end)
      .def("abandon", &Recording::abandon);
  pybind11::class_<Pushes>(m, "Pushes", pybind11::module_local())
      .def(
          pybind11::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t>())
      .def("launch",
           pybind11::overload_cast<const Recording&, const std::vector<int64_t>&, const Tensor&, bool>(&Pushes::launch))
      .def("follow", &Pushes::follow)
      .def("collect", &Pushes::collect, pybind11::call_guard<pybind11::gil_scoped_release>());
}
