// The vocoder's kernels for Python: checks tensors, launches on the current stream, so that a CUDA graph can record
// them.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
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

const qmk::Frames* frames_of(const Tensor& t) {
  return reinterpret_cast<const qmk::Frames*>(data<int>(t, sizeof(qmk::Frames) / sizeof(int), "frames"));
}

qmk::History history(const Tensor& fresh, const Maybe& past, const Tensor& frames, int64_t room, int64_t rows,
                     int64_t channels) {
  const int64_t kept = past ? past->size(1) : 0;
  if (past)
    TORCH_CHECK(past->dim() == 3 && past->size(2) == channels, message("past must be [slots, kept, ", channels, "]"));
  TORCH_CHECK(room > 0 && room <= qmk::kPushRows,
              message("expected room for 1 to ", qmk::kPushRows, " frames, got ", room));
  return {data(fresh, room * rows * channels, "fresh"),
          past ? of_slots(*past, "past") : nullptr,
          past ? past->stride(0) : 0,
          frames_of(frames),
          static_cast<int>(room),
          static_cast<int>(rows),
          static_cast<int>(kept),
          static_cast<int>(channels)};
}

// What Python hands over for a qmk::Convolution, by these names.
struct ConvolutionTensors {
  Tensor fresh;            // [room * rows][channels], halves
  Maybe past;              // [slots][(taps - 1) * dilation][channels], halves; none where that is no row
  Tensor frames;           // int32, a qmk::Frames
  int64_t room, rows;      // frames, at most; rows of a frame
  int64_t dilation;        // rows from tap to tap
  Tensor weight;           // fp16 [taps][channels / kChannelTile][columns][2 * kChannelTile]
  Tensor bias;             // [columns]
  Maybe residual;          // [room * rows][columns], added
  Maybe out;               // [room * rows][columns], the sum
  Maybe activated;         // [room * rows][columns], halves of the activated sum
  int64_t activation;      // a qmk::Activation
  Maybe frequency, scale;  // [channels_out], SnakeBeta's
  bool exact;              // products as precise as fp32's, or as TF32's
};

qmk::Convolution convolution_of(const ConvolutionTensors& t) {
  TORCH_CHECK(
      t.weight.dim() == 4 && t.weight.size(3) == 2 * qmk::kChannelTile,
      message("weight must be [taps, channels / ", qmk::kChannelTile, ", columns, ", 2 * qmk::kChannelTile, "]"));
  const int64_t taps = t.weight.size(0), channels = t.weight.size(1) * qmk::kChannelTile, columns = t.weight.size(2),
                values = t.room * t.rows * columns;
  qmk::Convolution c{};
  c.in = history(t.fresh, t.past, t.frames, t.room, t.rows, channels);
  TORCH_CHECK(c.in.kept == (taps - 1) * t.dilation,
              message("the past must be ", (taps - 1) * t.dilation, " rows, got ", c.in.kept));
  TORCH_CHECK(columns % qmk::kChannelTile == 0,
              message("columns must be a multiple of ", qmk::kChannelTile, ", got ", columns));
  c.taps = static_cast<int>(taps);
  c.dilation = static_cast<int>(t.dilation);
  c.weight = reinterpret_cast<const uint16_t*>(data<c10::Half>(t.weight, 1, "weight"));
  c.bias = data(t.bias, columns, "bias");
  c.columns = static_cast<int>(columns);
  c.residual = maybe(t.residual, values, "residual");
  c.out = maybe(t.out, values, "out");
  c.activation = static_cast<qmk::Activation>(t.activation);
  c.activated = maybe(t.activated, values, "activated");
  if (c.activation == qmk::Activation::kSnake) {
    TORCH_CHECK(t.frequency && t.scale, "SnakeBeta needs frequency and scale");
    c.channels_out = static_cast<int>(t.frequency->numel());
    c.frequency = data(*t.frequency, 1, "frequency");
    c.scale = data(*t.scale, c.channels_out, "scale");
  }
  c.exact = t.exact;
  return c;
}

// following: of one tap, in the same launch; or none.
void convolve(const ConvolutionTensors& t, const std::optional<ConvolutionTensors>& following) {
  const c10::cuda::CUDAGuard guard(t.fresh.device());
  const auto second = following ? std::optional(convolution_of(*following)) : std::nullopt;
  check(qmk::convolve(convolution_of(t), second ? &*second : nullptr, stream_of(t.fresh)));
}

void depthwise_norm(const Tensor& fresh, const Tensor& past, const Tensor& frames, int64_t room, int64_t rows,
                    const Tensor& weight, const Tensor& bias, const Tensor& gain, const Tensor& shift, double eps,
                    const Tensor& out) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  const int64_t channels = weight.size(1);
  check(qmk::depthwise_norm(history(fresh, past, frames, room, rows, channels), data(weight, 7 * channels, "weight"),
                            data(bias, channels, "bias"), data(gain, channels, "gain"), data(shift, channels, "shift"),
                            static_cast<float>(eps), data(out, room * rows * channels, "out"), stream_of(fresh)));
}

// past: of the embeddings, as `history` takes it. tensors: weights, bias_in, bias_out, inv_freq, rings
// [slots][layers][2][heads] [ring][head_dim], position, epoch, fault, and what blocks hand each other (h, qkv,
// attended, gated), int32 [2 * values], and vectors, fp32; sizes: of the rest of qmk::Layers.
void transform(const Tensor& embedding, const Tensor& past, const Tensor& frames, int64_t room, const Tensor& out,
               const std::map<std::string, Tensor>& tensors, const std::map<std::string, int64_t>& sizes, double eps) {
  const c10::cuda::CUDAGuard guard(embedding.device());
  auto size = [&](const char* name) { return static_cast<int>(sizes.at(name)); };
  const Tensor& rings = tensors.at("rings");
  TORCH_CHECK(rings.dim() == 6 && rings.size(2) == 2, "rings must be [slots, layers, 2, heads, ring, head_dim]");
  qmk::Layers p{};
  p.in = history(embedding, past, frames, room, 1, past.size(2));
  p.eps = static_cast<float>(eps);
  p.layers = static_cast<int>(rings.size(1)), p.heads = static_cast<int>(rings.size(3)),
  p.ring = static_cast<int>(rings.size(4));
  p.head_dim = static_cast<int>(rings.size(5)), p.blocks = size("blocks"), p.shared_bytes = size("shared_bytes"),
  p.hidden = size("hidden"), p.columns_out = size("columns_out");
  p.intermediate = size("intermediate"), p.window = size("window"),
  p.spin_limit = static_cast<uint32_t>(sizes.at("spin_limit"));
  const int64_t width = p.heads * p.head_dim;
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
    return reinterpret_cast<uint2*>(data<int>(tensors.at(name), 2 * room * values, name));
  };
  p.h = exchange("h", p.hidden), p.qkv = exchange("qkv", 3 * width);
  p.attended = exchange("attended", width), p.gated = exchange("gated", p.intermediate);
  p.vectors = data(tensors.at("vectors"), room * (p.hidden + 4 * width + p.intermediate), "vectors");
  p.out = data(out, room * p.columns_out, "out");
  check(qmk::transform(p, stream_of(embedding)));
}

float** cell(const Tensor& t) { return reinterpret_cast<float**>(data<int64_t>(t, 1, "the PCM's place")); }

void convolve_to_sound(const Tensor& fresh, const Tensor& past, const Tensor& frames, int64_t room, int64_t rows,
                       const Tensor& weight, const Tensor& bias, const Tensor& place) {
  const c10::cuda::CUDAGuard guard(fresh.device());
  check(qmk::convolve_to_sound(history(fresh, past, frames, room, rows, weight.size(1)),
                               data(weight, 7 * weight.size(1), "weight"), data(bias, 1, "bias"), cell(place),
                               stream_of(fresh)));
}

// histories: (fresh, past, rows of a frame). position: int64 [slots], goes on by the frames; or none.
void keep_histories(const std::vector<std::tuple<Tensor, Tensor, int64_t>>& histories, const Tensor& frames,
                    int64_t room, const Maybe& position) {
  const c10::cuda::CUDAGuard guard(frames.device());
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
  p.room = static_cast<int>(room), p.frames = frames_of(frames);
  p.position = position ? data<int64_t>(*position, 1, "position") : nullptr;
  check(qmk::keep_histories(p, stream_of(frames)));
}

// Fill tensors with zeros, in one call, because every call into torch gives other Python threads a turn.
void zero(std::vector<Tensor> tensors) {
  for (auto& tensor : tensors) tensor.zero_();
}

// A push with room for some frames, recorded from the current stream.
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

// Are all values of a contiguous fp32 tensor on the CPU finite? Others have the highest exponent. Here, because a numpy
// call for each sequence would give the interpreter to other threads each time.
bool finite(const Tensor& values) {
  const float* x = values.data_ptr<float>();
  const uint32_t top = 0x7f800000;
  uint32_t most = 0;
  for (int64_t i = 0; i < values.numel(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    most = std::max(most, bits & top);
  }
  return most < top;
}

// Pushes on their way: frames and codes go with a launch, PCM comes back into pinned memory, so that several may be
// queued. Nothing here waits but `collect`.
class Pushes {
 public:
  // table: [groups][size][channels]. What recorded pushes read: frames int32 [sizeof(Frames) / 4], embedding
  // [rows][channels], place int64 [1].
  // unwanted: [rows * samples], where the PCM goes that nobody wants; samples: of a frame; rows: frames of the largest
  // push.
  Pushes(const Tensor& table, const Tensor& frames, const Tensor& embedding, const Tensor& place,
         const Tensor& unwanted, int64_t samples, int64_t rows)
      : kept_{table, frames, embedding, place, unwanted}, samples_(samples), rows_(rows) {
    TORCH_CHECK(rows > 0 && rows <= qmk::kPushRows, message("expected 1 to ", qmk::kPushRows, " rows, got ", rows));
    TORCH_CHECK(table.dim() == 3 && table.size(0) == qmk::kGroups, "table must be [16, size, channels]");
    inputs_ = {data(table, 1, "table"),
               static_cast<int>(table.size(1)),
               static_cast<int>(table.size(2)),
               const_cast<qmk::Frames*>(frames_of(frames)),
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

  // Queue a push of counts[i] frames of slots[i], with host codes int64 [frames][groups]; its ticket for `collect`, -1
  // where nobody wants the PCM.
  int64_t launch(const Recording& recording, const std::vector<int64_t>& slots, const std::vector<int64_t>& counts,
                 const Tensor& codes, bool wanted) {
    qmk::Push push = about(slots, counts);
    TORCH_CHECK(codes.is_cpu() && codes.is_contiguous() && codes.scalar_type() == torch::kInt64 && codes.dim() == 2 &&
                    codes.size(0) == push.frames.count && codes.size(1) == qmk::kGroups,
                message("codes must be contiguous int64 [", push.frames.count, ", ", qmk::kGroups, "] on the CPU, got ",
                        codes.toString(), " of ", codes.numel(), " values"));
    std::copy_n(codes.data_ptr<int64_t>(), codes.numel(), push.codes);
    return launch(recording, push, wanted);
  }
  // Queue a push of the codes that the frame kernel left in `recent` [slots][kRecentFrames][groups], from frame
  // first[i] of slots[i] on.
  int64_t follow(const Recording& recording, const std::vector<int64_t>& slots, const std::vector<int64_t>& counts,
                 const Tensor& recent, const std::vector<int64_t>& first) {
    qmk::Push push = about(slots, counts);
    TORCH_CHECK(first.size() == slots.size(),
                message("expected one first frame a slot, got ", first.size(), " for ", slots.size(), " slots"));
    for (size_t i = 0; i < slots.size(); ++i) {
      TORCH_CHECK(slots[i] >= 0 && slots[i] < recent.size(0), message("slot ", slots[i], " has no recent codes"));
      const auto& sequence = push.frames.sequence[i];
      for (int f = 0; f < sequence.count; ++f) push.number[sequence.begin + f] = static_cast<int>(first[i] + f);
    }
    push.recent = data<int>(recent, 1, "recent");
    return launch(recording, push, true);
  }
  // Wait for a push: the PCM of each of its sequences, fp32 [counts[i] * samples], in memory of its own, and
  // whether it is finite.
  std::vector<std::pair<Tensor, bool>> collect(int64_t ticket, const std::vector<int64_t>& counts) const {
    TORCH_CHECK(ticket < launched_ && launched_ - ticket <= qmk::kPushesAhead,
                message("the last ", qmk::kPushesAhead, " of ", launched_, " pushes are kept, got ", ticket));
    check(cudaEventSynchronize(done_[ticket % qmk::kPushesAhead]));
    const Tensor all = sound_[ticket % qmk::kPushesAhead];
    std::vector<std::pair<Tensor, bool>> sounds;
    for (int64_t at = 0, i = 0; i < static_cast<int64_t>(counts.size()); at += counts[i++]) {
      const Tensor sound = all.slice(0, at * samples_, (at + counts[i]) * samples_);
      sounds.emplace_back(sound.clone(), finite(sound));
    }
    return sounds;
  }

 private:
  qmk::Push about(const std::vector<int64_t>& slots, const std::vector<int64_t>& counts) const {
    TORCH_CHECK(!slots.empty() && slots.size() == counts.size(),
                message("expected the frames of each slot, got ", counts.size(), " for ", slots.size(), " slots"));
    qmk::Push push{};
    for (size_t i = 0; i < slots.size(); ++i) {
      auto& f = push.frames;
      TORCH_CHECK(counts[i] > 0 && counts[i] <= qmk::kPushFrames && f.count + counts[i] <= rows_,
                  message("a push takes 1 to ", qmk::kPushFrames, " frames of a slot, and ", rows_, " in all; got ",
                          counts[i], " behind ", f.count));
      const int slot = static_cast<int>(slots[i]), begin = f.count;
      f.sequence[f.sequences++] = {slot, begin, static_cast<int>(counts[i])};
      while (f.count < begin + counts[i]) f.of[f.count++] = {slot, begin};
    }
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
  using namespace pybind11::literals;
  pybind11::class_<ConvolutionTensors>(m, "Convolution", pybind11::module_local())
      .def(pybind11::init<Tensor, Maybe, Tensor, int64_t, int64_t, int64_t, Tensor, Tensor, Maybe, Maybe, Maybe,
                          int64_t, Maybe, Maybe, bool>(),
           pybind11::kw_only(), "fresh"_a, "past"_a, "frames"_a, "room"_a, "rows"_a, "dilation"_a, "weight"_a, "bias"_a,
           "residual"_a, "out"_a, "activated"_a, "activation"_a, "frequency"_a, "scale"_a, "exact"_a);
  m.def("convolve", &convolve);
  m.def("can_follow", &qmk::can_follow);
  m.def("depthwise_norm", &depthwise_norm);
  m.def("transform", &transform);
  m.def("convolve_to_sound", &convolve_to_sound);
  m.def("keep_histories", &keep_histories);
  m.def("zero", &zero);
  pybind11::class_<Recording>(m, "Recording", pybind11::module_local())
      .def(pybind11::init([](const Tensor& on) { return std::make_unique<Recording>(on.device()); }))
      .def("end", &Recording::end)
      .def("abandon", &Recording::abandon);
  pybind11::class_<Pushes>(m, "Pushes", pybind11::module_local())
      .def(
          pybind11::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t>())
      .def("launch", pybind11::overload_cast<const Recording&, const std::vector<int64_t>&, const std::vector<int64_t>&,
                                             const Tensor&, bool>(&Pushes::launch))
      .def("follow", &Pushes::follow)
      .def("collect", &Pushes::collect, pybind11::call_guard<pybind11::gil_scoped_release>());
}
