// The border to Python: checks every tensor, keeps the slots' counters, fills FrameParams, launches.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "frame.h"
#include "prompt.h"
#include "say.h"

namespace {

using qmk::say;
using Tensors = std::map<std::string, torch::Tensor>;
using Settings = std::map<std::string, double>;
constexpr int kAhead = 4;  // launches that may be uncollected
constexpr int kGroups = 16;

template <class T>
T* check(const torch::Tensor& t, const std::string& name, torch::ScalarType dtype, int64_t at_least) {
  TORCH_CHECK(t.is_cuda() && t.is_contiguous() && t.scalar_type() == dtype && t.numel() >= at_least, say(name, " must be a contiguous CUDA ",
              c10::toString(dtype), " tensor of at least ", at_least, " values, got ", t.toString(), " of ", t.numel()));
  return reinterpret_cast<T*>(t.data_ptr());
}
void check_launched(cudaError_t error, const char* what) { TORCH_CHECK(error == cudaSuccess, say(what, ": ", cudaGetErrorString(error))); }
cudaStream_t stream_of(const torch::Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.device().index()); }

struct Slot {
  qmk::Column column{};                 // of the next launch, but for its text row
  torch::Tensor pages, seen, row, recent;  // kept alive
  torch::Tensor text, pad;              // bf16 [n][hidden], [hidden]
};

class Launcher {
 public:
  Launcher(int64_t talker_hidden, int64_t slots, Tensors tensors, const Settings& settings)
      : hidden_(talker_hidden), tensors_(std::move(tensors)), slots_(slots) {
    const auto ribbon = tensors_.find("talker.ribbon");
    TORCH_CHECK(ribbon != tensors_.end() && ribbon->second.is_cuda(), "talker.ribbon must be a CUDA tensor");
    device_ = ribbon->second.device();
    const c10::cuda::CUDAGuard guard(device_);
    columns_ = static_cast<int>(settings.at("columns"));
    int resident = 0;
    check_cuda(qmk::prepare_frame<false>(static_cast<int>(hidden_), &resident));
    if constexpr (qmk::kWideColumns > 0) {
      int wide = resident;
      if (columns_ > qmk::kNarrowColumns) check_cuda(qmk::prepare_frame<true>(static_cast<int>(hidden_), &wide));
      resident = std::min(resident, wide);
    }
    TORCH_CHECK(resident >= qmk::kBlocks, say("the kernel's ", qmk::kBlocks, " blocks must be resident at once, this GPU holds ", resident));
    auto stack = [&](const std::string& name, qmk::StackWeights& w) {
      w.ribbon = data<uint8_t>(name + ".ribbon", torch::kUInt8);
      w.input_norm = data<qmk::bf16>(name + ".input_norm", torch::kBFloat16);
      w.post_norm = data<qmk::bf16>(name + ".post_norm", torch::kBFloat16);
      w.q_norm = data<qmk::bf16>(name + ".q_norm", torch::kBFloat16);
      w.k_norm = data<qmk::bf16>(name + ".k_norm", torch::kBFloat16);
      w.norm = data<qmk::bf16>(name + ".norm", torch::kBFloat16);
      w.rope_cos = data<float>(name + ".rope_cos", torch::kFloat32);
      w.rope_sin = data<float>(name + ".rope_sin", torch::kFloat32);
      w.layers = static_cast<int>(tensors_.at(name + ".input_norm").size(0));
    };
    stack("talker", p_.talker);
    stack("predictor", p_.predictor);
    p_.codec_head = data<uint8_t>("codec_head", torch::kUInt8);
    p_.lm_heads = data<uint8_t>("lm_heads", torch::kUInt8);
    if (tensors_.count("adapter")) {
      p_.adapter = data<uint8_t>("adapter", torch::kUInt8);
      p_.adapter_bias = data<float>("adapter_bias", torch::kFloat32);
    }
    auto scales = [&](bool fp8, const char* name) { return fp8 ? data<float>(name, torch::kFloat32) : nullptr; };
    p_.talker_scales = scales(qmk::kFp8Talker, "talker.scales");
    p_.predictor_scales = scales(qmk::kFp8Predictor, "predictor.scales");
    p_.codec_head_scales = scales(qmk::kFp8CodecHead, "codec_head_scales");
    p_.lm_head_scales = scales(qmk::kFp8LmHeads, "lm_head_scales");
    p_.code0_embedding = data<qmk::bf16>("code0_embedding", torch::kBFloat16);
    p_.code_embedding = data<qmk::bf16>("code_embedding", torch::kBFloat16);
    auto tagged = [&](const char* name) { return data<qmk::Tagged>(name, torch::kInt32); };
    auto packets = [&](const char* name) { return data<qmk::Packet>(name, torch::kInt32); };
    p_.x = {tagged("x.qkv"), packets("x.part"), packets("x.attn"), packets("x.h_attn"), packets("x.mlp"),
            packets("x.h_mlp"), packets("x.adapted"), packets("x.logits"), tagged("x.drawn")};
    p_.kv = data<qmk::bf16>("kv", torch::kBFloat16);
    p_.frame_kv = data<qmk::bf16>("frame_kv", torch::kBFloat16);
    p_.eos_id = static_cast<int>(settings.at("eos_id"));
    p_.first_suppressed_id = static_cast<int>(settings.at("first_suppressed_id"));
    p_.min_frames = static_cast<int>(settings.at("min_frames"));
    p_.spin_limit = static_cast<uint32_t>(settings.at("spin_limit"));
    // Pinned host memory that the kernel writes itself: no copy behind the launch.
    const auto pinned = torch::TensorOptions().dtype(torch::kInt32).pinned_memory(true);
    codes_ = torch::zeros({kAhead, columns_, qmk::kSaid}, pinned);
    fault_ = torch::zeros({1}, pinned);
    p_.fault = reinterpret_cast<uint32_t*>(fault_.data_ptr());
    for (auto& event : done_) check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  ~Launcher() {
    for (auto& event : done_) cudaEventDestroy(event);
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // A new stream in a slot, at position 0. Tensors belong to the slot; `row` is its next input.
  void begin(int64_t slot, const torch::Tensor& pages, const torch::Tensor& seen, const torch::Tensor& row, const torch::Tensor& recent,
             const Settings& sampling, uint64_t seed) {
    Slot& s = at(slot);
    s.pages = pages, s.seen = seen, s.row = row, s.recent = recent;
    qmk::Column& c = s.column;
    c = {};
    c.row = c.next_row = check<float>(row, "row", torch::kFloat32, hidden_);
    c.pages = check<int>(pages, "pages", torch::kInt32, 1);
    c.seen = check<uint8_t>(seen, "seen", torch::kUInt8, 1);
    c.recent = check<int>(recent, "recent", torch::kInt32, 8 * kGroups);
    c.seed = seed;
    c.repetition_penalty = static_cast<float>(sampling.at("repetition_penalty"));
    c.inverse_penalty = static_cast<float>(1.0 / sampling.at("repetition_penalty"));
    auto draw = [&](const std::string& prefix) {
      return qmk::DrawParams{static_cast<int>(sampling.at(prefix + "sample")), static_cast<float>(1.0 / sampling.at(prefix + "temperature")),
                             static_cast<int>(sampling.at(prefix + "top_k")), static_cast<float>(sampling.at(prefix + "top_p"))};
    };
    c.draw0 = draw("code0_");
    c.draw = draw("predictor_");
  }
  // Text rows bf16 [n][hidden] of a stream, one per frame, and what follows them.
  void set_text(int64_t slot, const torch::Tensor& rows, const torch::Tensor& pad) {
    if (rows.size(0)) check<qmk::bf16>(rows, "text rows", torch::kBFloat16, hidden_);
    check<qmk::bf16>(pad, "pad", torch::kBFloat16, hidden_);
    at(slot).text = rows, at(slot).pad = pad;
  }
  // Where a slot stands, once its pages were filled by another hand (kept prefixes, tests, benchmarks).
  void seek(int64_t slot, int64_t position, int64_t frame) {
    at(slot).column.position = static_cast<int>(position), at(slot).column.frame = static_cast<int>(frame);
  }

  // Keys and values of consecutive prompt rows, as many at a time as there are columns.
  // rows: fp32 [n][hidden].
  void prefill(int64_t slot, const torch::Tensor& rows) {
    Slot& s = at(slot);
    const int64_t n = rows.size(0);
    if (n == 0) return;
    const float* data = check<float>(rows, "rows", torch::kFloat32, n * hidden_);
    room(s, n);
    for (int64_t from = 0; from < n; from += qmk::kNarrowColumns) {
      qmk::FrameParams p = p_;
      p.prefill = 1;
      p.columns = static_cast<int>(std::min<int64_t>(qmk::kNarrowColumns, n - from));
      const int first = s.column.position;
      for (int i = 0; i < p.columns; i++) {
        p.column[i] = s.column;
        p.column[i].row = data + (from + i) * hidden_;
        p.column[i].position = first + i;
        p.column[i].first_fresh = first;
      }
      s.column.position += p.columns;
      launch(p, p.talker.layers);
    }
  }

  // Queue one frame of each of these slots.
  void decode(const std::vector<int64_t>& slots) {
    TORCH_CHECK(!slots.empty() && static_cast<int>(slots.size()) <= columns_, say("a launch takes 1 to ", columns_, " slots, got ", slots.size()));
    TORCH_CHECK(launched_ - collected_ < kAhead, say(kAhead, " launches wait to be collected; collect() first"));
    for (auto slot : slots) room(at(slot), 1);
    qmk::FrameParams p = p_;
    p.columns = 0;
    for (auto slot : slots) {
      Slot& s = at(slot);
      qmk::Column& c = p.column[p.columns++] = s.column;
      c.first_fresh = c.position;
      const bool text = s.text.defined() && c.frame < s.text.size(0);
      c.text_row = reinterpret_cast<const qmk::bf16*>(text ? s.text.data_ptr() : s.pad.data_ptr()) + (text ? c.frame * hidden_ : 0);
      s.column.position++, s.column.frame++;
    }
    const int i = launched_ % kAhead;
    p.codes = codes_.data_ptr<int>() + i * columns_ * qmk::kSaid;
    for (int column = 0; column < p.columns; column++) p.codes[column * qmk::kSaid + kGroups] = 0;
    launch(p, p.talker.layers + kGroups * p.predictor.layers);
    const c10::cuda::CUDAGuard guard(device_);
    check_cuda(cudaEventRecord(done_[i], c10::cuda::getCurrentCUDAStream(device_.index())));
    launched_++;
  }

  // Wait for the oldest uncollected launch: int32 [columns][17], codes and whether a logit was no number, a view that the fourth launch from now overwrites.
  torch::Tensor collect() {
    TORCH_CHECK(launched_ > collected_, "nothing was launched; decode() first");
    const int i = collected_++ % kAhead;
    check_cuda(cudaEventSynchronize(done_[i]));
    return codes_[i];
  }
  int64_t uncollected() const { return launched_ - collected_; }

  // Where the next launches leave what tests and benchmarks look at; see FrameParams.
  void observe(const c10::optional<torch::Tensor>& hidden, const c10::optional<torch::Tensor>& logits, const c10::optional<torch::Tensor>& stage_ns) {
    observed_ = {hidden.value_or(torch::Tensor()), logits.value_or(torch::Tensor()), stage_ns.value_or(torch::Tensor())};
    p_.hidden_out = hidden ? check<float>(*hidden, "hidden", torch::kFloat32, columns_ * hidden_) : nullptr;
    p_.logits_out = logits ? check<float>(*logits, "logits", torch::kFloat32, columns_ * kGroups) : nullptr;
    p_.stage_ns = stage_ns ? check<unsigned long long>(*stage_ns, "stage_ns", torch::kInt64, 2 * qmk::kStages) : nullptr;
  }

  torch::Tensor fault() const { return fault_; }  // [1], not 0 after a wait inside the kernel gave up
  int64_t epoch() const { return epoch_; }
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

 private:
  static void check_cuda(cudaError_t error) { check_launched(error, "frame kernel"); }
  Slot& at(int64_t slot) {
    TORCH_CHECK(slot >= 0 && slot < static_cast<int64_t>(slots_.size()), say("slot must be in 0..", slots_.size() - 1, ", got ", slot));
    return slots_[slot];
  }
  void room(const Slot& s, int64_t rows) const {
    TORCH_CHECK(s.pages.defined(), "no stream was started in this slot");
    TORCH_CHECK(s.column.position + rows <= s.pages.numel() * qmk::kPagePositions, say("position ", s.column.position + rows - 1,
                " is past the slot's ", s.pages.numel(), " pages"));
  }
  void launch(qmk::FrameParams& p, int64_t epochs) {
    const c10::cuda::CUDAGuard guard(device_);
    if (epoch_ + epochs > 0xFFFFFFFF) {  // a slot that was last written 2^32 passes ago must not look new
      for (auto& [name, tensor] : tensors_)
        if (name.rfind("x.", 0) == 0) tensor.zero_();
      epoch_ = 0;
    }
    p.epoch = static_cast<uint32_t>(epoch_);
    check_cuda(launch(p, c10::cuda::getCurrentCUDAStream(device_.index())));
    epoch_ += epochs;
  }
  cudaError_t launch(const qmk::FrameParams& p, cudaStream_t stream) const {
    const int talker_hidden = static_cast<int>(hidden_);
    if constexpr (qmk::kWideColumns > 0) {
      if (p.columns > qmk::kNarrowColumns) return qmk::launch_frame<true>(talker_hidden, p, stream);
    }
    return qmk::launch_frame<false>(talker_hidden, p, stream);
  }
  template <class T>
  T* data(const std::string& name, torch::ScalarType dtype) {
    const auto it = tensors_.find(name);
    TORCH_CHECK(it != tensors_.end(), say("tensor ", name, " is missing"));
    return check<T>(it->second, name, dtype, 1);
  }

  int64_t hidden_;
  int columns_ = 0;  // of a launch, at most
  Tensors tensors_;  // kept alive as long as the pointers below
  std::vector<Slot> slots_;
  c10::Device device_{c10::kCPU};
  torch::Tensor codes_, fault_;
  std::array<torch::Tensor, 3> observed_;
  std::array<cudaEvent_t, kAhead> done_{};
  int64_t launched_ = 0, collected_ = 0, epoch_ = 0;
  qmk::FrameParams p_{};
};

// Rows of talker width for text ids, bf16 [n][hidden] on the device of the weights; queued, not waited for.
// table: bf16 [ids][inner] on the host; weights as torch.nn.Linear has them.
torch::Tensor project_text(const std::vector<int64_t>& ids, const torch::Tensor& table, const torch::Tensor& weight1, const torch::Tensor& bias1,
                           const torch::Tensor& weight2, const torch::Tensor& bias2) {
  const int64_t n = ids.size(), inner = weight1.size(0), hidden = weight2.size(0), row = inner * sizeof(qmk::bf16);
  TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.scalar_type() == torch::kBFloat16 && table.dim() == 2 && table.size(1) == inner,
              say("the text's table must be bf16 [ids][", inner, "] on the CPU"));
  for (const auto* t : {&weight1, &bias1, &weight2, &bias2})
    TORCH_CHECK(t->is_cuda() && t->is_contiguous() && t->scalar_type() == torch::kBFloat16, "the text projection must be bf16 on the GPU");
  TORCH_CHECK(weight1.numel() == inner * inner && bias1.numel() == inner && weight2.numel() == hidden * inner && bias2.numel() == hidden,
              "the text projection has other shapes");
  // From pinned memory, which the allocator keeps until the copy is done.
  const auto staged = torch::empty({n, inner}, torch::TensorOptions().dtype(torch::kBFloat16).pinned_memory(true));
  for (int64_t i = 0; i < n; i++) {
    TORCH_CHECK(ids[i] >= 0 && ids[i] < table.size(0), say("text id ", ids[i], " is not in the table"));
    std::memcpy(static_cast<char*>(staged.data_ptr()) + i * row, static_cast<const char*>(table.data_ptr()) + ids[i] * row, row);
  }
  const c10::cuda::CUDAGuard guard(weight1.device());
  const auto embedded = staged.to(weight1.device(), /*non_blocking=*/true);
  const auto between = torch::empty_like(embedded), out = torch::empty({n, hidden}, embedded.options());
  auto at = [](const torch::Tensor& t) { return reinterpret_cast<qmk::bf16*>(t.data_ptr()); };
  const qmk::Projection p{at(embedded), at(weight1), at(bias1), at(weight2), at(bias2), at(between), at(out), static_cast<int>(inner), static_cast<int>(hidden)};
  if (n) check_launched(qmk::project_text(p, static_cast<int>(n), stream_of(weight1)), "text projection");
  return out;
}

// ---- long prompts (prefill.py): every tensor contiguous on one GPU unless said
qmk::bf16* halves(const torch::Tensor& t, int64_t at_least, const char* name) { return check<qmk::bf16>(t, name, torch::kBFloat16, at_least); }

// The four matrices that `pack` put one behind the other at `start` bytes of every block's part of a ribbon uint8 [128][bytes],
// each of sizes[i] bytes a block, into outs[i], bf16 [rows][k]. scales: fp32, of all their rows, where they are E4M3.
void unpack(const torch::Tensor& ribbon, int64_t start, const c10::optional<torch::Tensor>& scales, const std::vector<int64_t>& block_rows, const std::vector<int64_t>& packets,
            const std::vector<int64_t>& sizes, const std::vector<torch::Tensor>& outs) {
  TORCH_CHECK(ribbon.dim() == 2 && ribbon.size(0) == qmk::kBlocks, "the ribbon must be uint8 [128][bytes]");
  TORCH_CHECK(outs.size() == qmk::kMatrices && block_rows.size() == outs.size() && packets.size() == outs.size() && sizes.size() == outs.size(), "four matrices");
  const c10::cuda::CUDAGuard guard(ribbon.device());
  qmk::Ribbons all{};
  all.block_bytes = ribbon.size(1);
  const uint8_t* data = check<uint8_t>(ribbon, "the ribbon", torch::kUInt8, 1);
  int64_t rows = 0;
  for (const auto& out : outs) rows += out.size(0);
  const float* scale = scales ? check<float>(*scales, "scales", torch::kFloat32, rows) : nullptr;
  for (size_t i = 0; i < outs.size(); start += sizes[i], i++) {
    const auto& out = outs[i];
    TORCH_CHECK(out.dim() == 2 && start % 16 == 0 && block_rows[i] * out.size(1) * (scale ? 1 : 2) <= sizes[i] && start + sizes[i] <= ribbon.size(1), "the matrix does not lie in the ribbon");
    all.matrix[i] = {data + start, static_cast<int>(out.size(0)), static_cast<int>(out.size(1)), static_cast<int>(block_rows[i]),
                     static_cast<int>(packets[i]), reinterpret_cast<uint32_t*>(halves(out, 1, "out")), scale};
    if (scale) scale += out.size(0);
  }
  check_launched(qmk::unpack(all, stream_of(ribbon)), "unpack");
}

void add_norm(const torch::Tensor& x, const c10::optional<torch::Tensor>& delta, const torch::Tensor& weight, double eps, const torch::Tensor& y) {
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t rows = x.size(0), hidden = x.size(1);
  TORCH_CHECK(x.dim() == 2 && hidden % 2 == 0, "x must be [rows][hidden]");
  check_launched(qmk::add_norm(check<float>(x, "x", torch::kFloat32, 1), delta ? halves(*delta, rows * hidden, "delta") : nullptr, halves(weight, hidden, "weight"),
                               static_cast<float>(eps), static_cast<int>(rows), static_cast<int>(hidden), halves(y, rows * hidden, "y"), stream_of(x)),
                 "add_norm");
}

// kv: one layer's, a view [pages][2][kv_heads][page][128] whose pages lie apart.
qmk::Heads heads(const torch::Tensor& kv, const torch::Tensor& at, const torch::Tensor& pages) {
  TORCH_CHECK(kv.dim() == 5 && kv.size(1) == 2 && kv.size(4) == 128 && kv.is_cuda() && kv.scalar_type() == torch::kBFloat16 && kv[0].is_contiguous(),
              "kv must be bf16 [pages][2][kv_heads][page][128]");
  qmk::Heads p{};
  p.rows = static_cast<int>(at.numel());
  p.at = check<int64_t>(at, "at", torch::kInt64, 1), p.pages = check<int64_t>(pages, "pages", torch::kInt64, 1);
  p.kv = reinterpret_cast<qmk::bf16*>(kv.data_ptr()), p.page_stride = kv.stride(0);
  p.kv_heads = static_cast<int>(kv.size(2)), p.page = static_cast<int>(kv.size(3));
  return p;
}
void place_heads(const torch::Tensor& qkv, const torch::Tensor& q_norm, const torch::Tensor& k_norm, const torch::Tensor& cos, const torch::Tensor& sin,
                 const torch::Tensor& kv, const torch::Tensor& at, const torch::Tensor& pages, double eps, const torch::Tensor& q) {
  const c10::cuda::CUDAGuard guard(qkv.device());
  qmk::Heads p = heads(kv, at, pages);
  TORCH_CHECK(q.dim() == 3 && q.size(1) == p.rows && q.size(2) == 128, "q must be [heads][rows][128]");
  p.heads = static_cast<int>(q.size(0)), p.eps = static_cast<float>(eps);
  p.qkv = halves(qkv, static_cast<int64_t>(p.rows) * (p.heads + 2 * p.kv_heads) * 128, "qkv"), p.q = halves(q, 1, "q");
  p.q_norm = halves(q_norm, 128, "q_norm"), p.k_norm = halves(k_norm, 128, "k_norm");
  p.cos = check<float>(cos, "cos", torch::kFloat32, 64), p.sin = check<float>(sin, "sin", torch::kFloat32, 64);
  check_launched(qmk::place_heads(p, stream_of(qkv)), "place_heads");
}
// keys, values: [heads][length][128].
void gather(const torch::Tensor& kv, const torch::Tensor& at, const torch::Tensor& pages, const torch::Tensor& keys, const torch::Tensor& values) {
  const c10::cuda::CUDAGuard guard(kv.device());
  qmk::Heads p = heads(kv, at, pages);
  TORCH_CHECK(keys.dim() == 3 && keys.size(2) == 128 && keys.size(0) % p.kv_heads == 0 && keys.sizes() == values.sizes(), "keys and values must be [heads][length][128]");
  TORCH_CHECK(keys.size(1) <= pages.numel() * p.page, "the slot has fewer positions");
  p.heads = static_cast<int>(keys.size(0));
  check_launched(qmk::gather(p, static_cast<int>(keys.size(1)), halves(keys, 1, "keys"), halves(values, 1, "values"), stream_of(kv)), "gather");
}
// both: (gate, up), alternating.
void gate(const torch::Tensor& both, const torch::Tensor& out) {
  const c10::cuda::CUDAGuard guard(both.device());
  check_launched(qmk::gate(halves(both, 2 * out.numel(), "both"), out.numel(), halves(out, 1, "out"), stream_of(both)), "gate");
}

}  // namespace

void bind_vocoder(pybind11::module_& m);  // vocoder_bindings.cpp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_vocoder(m);
  m.def("project_text", &project_text);
  m.def("unpack", &unpack);
  m.def("add_norm", &add_norm);
  m.def("place_heads", &place_heads);
  m.def("gather", &gather);
  m.def("gate", &gate);
  using Free = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.attr("COLUMNS") = qmk::kNarrowColumns;
  m.attr("MOST_COLUMNS") = qmk::kMostColumns;
  m.attr("FRAME_KV_SHARED") = qmk::kFrameKvShared;
  pybind11::class_<Launcher>(m, "Launcher", pybind11::module_local())  // builds for other weights have one too
      .def(pybind11::init<int64_t, int64_t, Tensors, Settings>())
      .def("begin", &Launcher::begin)
      .def("set_text", &Launcher::set_text)
      .def("seek", &Launcher::seek)
      .def("prefill", &Launcher::prefill, Free())
      .def("decode", &Launcher::decode)
      .def("collect", &Launcher::collect, Free())
      .def("uncollected", &Launcher::uncollected)
      .def("observe", &Launcher::observe)
      .def("fault", &Launcher::fault)
      .def_property("epoch", &Launcher::epoch, &Launcher::set_epoch);
}
