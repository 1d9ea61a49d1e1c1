// The frame kernel for Python: checks every tensor, keeps the slots' counters, fills FrameParams, launches.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../tensors.h"
#include "frame.h"

namespace {

using qmk::data_of;
using qmk::message;
using Tensors = std::map<std::string, torch::Tensor>;
using Settings = std::map<std::string, double>;

struct Slot {
  qmk::Column column{};                              // of the next launch, but for its text row
  torch::Tensor pages, seen, row, residual, recent;  // kept alive
  std::vector<int> ids;                              // of its pages
  std::vector<int> listed;                           // in its page table, maybe more: a longer sequence was here
  torch::Tensor text, pad, input_text;               // bf16 [n][hidden], [hidden], [hidden]
  int64_t positions = 0;                             // that its pages hold
  bool talked = false;                               // the talker's layers took its next input: residual is there
  qmk::Look look{};                                  // which heads are watched, and where the text begins
  torch::Tensor queries, told;                       // fp32 [kTellings][heads][head_dim], [kTellings][heads][kTold]

  // Frames take turns with `queries` and `told`.
  int64_t turn() const { return column.frame % qmk::kTellings * static_cast<int64_t>(look.heads); }
  qmk::Watch watch() const {
    if (!look.heads) return {};
    return {queries.data_ptr<float>() + turn() * qmk::kHeadDim, look.first_head, look.heads};
  }
};

// The rest of a prompt. rows: fp32 [n][hidden]; the last is the first frame's input.
struct Waiting {
  int64_t slot;
  torch::Tensor rows;
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
      int wide = 0;  // every engine may prefill with it
      check_cuda(qmk::prepare_frame<true>(static_cast<int>(hidden_), &wide));
      resident = std::min(resident, wide);
    }
    TORCH_CHECK(resident >= qmk::kBlocks,
                message("the kernel needs ", qmk::kBlocks, " blocks resident at once, this GPU holds ", resident));
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
    if (tensors_.count("tables.heads")) {
      p_.tables.heads = data<qmk::bf16>("tables.heads", torch::kBFloat16);
      if (p_.adapter) p_.tables.adapted = data<float>("tables.adapted", torch::kFloat32);
    }
    auto tagged = [&](const char* name) { return data<qmk::Tagged>(name, torch::kInt32); };
    auto packets = [&](const char* name) { return data<qmk::Packet>(name, torch::kInt32); };
    p_.x = {tagged("x.qkv"),    packets("x.part"),    packets("x.attn"),   packets("x.h_attn"), packets("x.mlp"),
            packets("x.h_mlp"), packets("x.adapted"), packets("x.logits"), tagged("x.drawn")};
    p_.kv = data<qmk::bf16>("kv", torch::kBFloat16);
    p_.frame_kv = data<qmk::bf16>("frame_kv", torch::kBFloat16);
    p_.eos_id = static_cast<int>(settings.at("eos_id"));
    p_.first_suppressed_id = static_cast<int>(settings.at("first_suppressed_id"));
    p_.min_frames = static_cast<int>(settings.at("min_frames"));
    // Measured on an H100 and an H200 (docs/log/2026-11-26.md#first-frame-starts): wider matrices want more on the way,
    // those of E4M3 half as much and less often; so do launches of 16 columns. Fewer blocks ask for as much together.
    const int blocks = 128 / qmk::kBlocks, wide = static_cast<int>(hidden_) / 512;
    p_.talker_pace = {std::max(2, qmk::kFp8Talker ? wide / 2 : wide) * blocks,
                      cycles_between_copies(device_.index(), 1.4)};
    wide_pace_ = {(qmk::kFp8Predictor ? 1 : 2) * blocks, cycles_between_copies(device_.index(), 1.2)};
    p_.predictor_pace = {wide_pace_.stages,
                         qmk::kFp8Predictor ? wide_pace_.cycles : cycles_between_copies(device_.index(), 1.6)};
    p_.pinned = pinned_stages(device_.index(), static_cast<double>(tensors_.at("predictor.ribbon").nbytes()));
    p_.spin_limit = static_cast<uint32_t>(settings.at("spin_limit"));
    // Pinned host memory that the kernel writes itself: no copy behind the launch.
    const auto pinned = torch::TensorOptions().dtype(torch::kInt32).pinned_memory(true);
    codes_ = torch::zeros({qmk::kLaunchesAhead, columns_, qmk::kResultWords}, pinned);
    fault_ = torch::zeros({1}, pinned);
    p_.fault = reinterpret_cast<uint32_t*>(fault_.data_ptr());
    for (auto& event : done_) check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (auto& event : told_) check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    check_cuda(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking));
    looks_ =
        torch::zeros({qmk::kTellings * slots * static_cast<int64_t>(sizeof(qmk::Look))}, pinned.dtype(torch::kUInt8));
    heads_ = {p_.talker.layers, static_cast<int>(settings.at("heads")), static_cast<int>(tensors_.at("kv").size(3))};
    if constexpr (qmk::kBatchColumns > 0)
      if (columns_ > qmk::kMostColumns) prepare_batch();
  }
  ~Launcher() {
    if (beside_) cudaStreamSynchronize(beside_), cudaStreamDestroy(beside_);  // it writes to memory that slots hold
    for (auto& event : done_) cudaEventDestroy(event);
    for (auto& event : told_) cudaEventDestroy(event);
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Fill the tables; fault() tells whether a wait gave up. Before the first frame: it says what frames look up.
  void fill_tables() {
    const int codes = static_cast<int>(tensors_.at("code_embedding").size(1));
    epoch_++;  // the adapter's output carries the epoch before its launch's first pass, and 0 is what memory holds
    for (int position = qmk::kFirstLookedUp; position < qmk::kGroups; position++)
      for (int first = 0; first < codes; first += qmk::kMostColumns) {
        qmk::FrameParams p = p_;
        p.tables.fill = true, p.tables.position = position, p.tables.first_code = first;
        p.columns = std::min(qmk::kMostColumns, codes - first);
        launch(p, 1);
      }
    const c10::cuda::CUDAGuard guard(device_);
    check_cuda(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device_.index())));
  }

  // A new sequence in a slot, at position 0. ids: the pages that hold its positions, in order. Tensors belong to the
  // slot; `pages` is its page table, `row` its next input. kept: keys and values bf16 [pages][...] of a prompt's first
  // `rows` rows, or none.
  void begin(int64_t slot, const std::vector<int>& ids, const torch::Tensor& pages, const torch::Tensor& seen,
             const torch::Tensor& row, const torch::Tensor& residual, const torch::Tensor& recent,
             const c10::optional<torch::Tensor>& kept, int64_t rows) {
    Slot& s = at(slot);
    const torch::Tensor& kv = tensors_.at("kv");
    const int64_t count = static_cast<int64_t>(ids.size()), copied = kept ? kept->size(0) : 0;
    TORCH_CHECK(copied <= count && count <= pages.numel(),
                message("a slot takes ", copied, " to ", pages.numel(), " pages, got ", count));
    for (const int id : ids)
      TORCH_CHECK(id >= 0 && id < kv.size(0), message("a page must be in 0..", kv.size(0) - 1, ", got ", id));
    std::erase_if(waiting_, [&](const Waiting& w) {  // its pages are this sequence's now
      const std::vector<int>& its = at(w.slot).ids;
      return w.slot == slot || std::find_first_of(its.begin(), its.end(), ids.begin(), ids.end()) != its.end();
    });
    // A lone caller gets the same pages again and again.
    const bool listed = s.pages.is_same(pages) && count <= static_cast<int64_t>(s.listed.size()) &&
                        std::equal(ids.begin(), ids.end(), s.listed.begin());
    s.pages = pages, s.seen = seen, s.row = row, s.residual = residual, s.recent = recent, s.talked = false;
    s.ids = ids;
    s.look = {};
    qmk::Column& c = s.column;
    c = {};
    c.row = c.next_row = data_of<float>(row, "row", torch::kFloat32, hidden_);
    data_of<float>(residual, "residual", torch::kFloat32, hidden_);
    c.pages = data_of<int>(pages, "pages", torch::kInt32, 1);
    c.seen = data_of<uint8_t>(seen, "seen", torch::kUInt8, 1);
    c.recent = data_of<int>(recent, "recent", torch::kInt32, qmk::kRecentFrames * qmk::kGroups);
    if (!listed) {
      // The copy waits for launches that read the old table. torch keeps the pinned memory until then.
      const auto table = torch::zeros(pages.sizes(), torch::TensorOptions().dtype(torch::kInt32).pinned_memory(true));
      std::copy(ids.begin(), ids.end(), table.data_ptr<int>());
      pages.copy_(table, /*non_blocking=*/true);
      s.listed = ids;
    }
    s.positions = count * qmk::kPagePositions;
    if (!kept) return;
    for (int64_t i = 0; i < copied; i++) kv[ids[i]].copy_((*kept)[i]);
    c.position = static_cast<int>(rows);
  }
  // Tell in each frame of a new sequence how some heads attend to its text, which begins at position text_at. The first
  // of the heads is first_head, counted through all layers. queries: fp32 [kTellings][heads][head_dim]. told: fp32
  // [kTellings][heads][kTold] in pinned memory; frame f is told at f % kTellings: see look_kernel.
  void watch(int64_t slot, const torch::Tensor& queries, const torch::Tensor& told, int64_t first_head,
             int64_t text_at) {
    Slot& s = at(slot);
    const int64_t heads = told.size(1), all = heads_.layers * heads_.heads;
    data_of<float>(queries, "queries", torch::kFloat32, qmk::kTellings * heads * qmk::kHeadDim);
    TORCH_CHECK(told.is_pinned() && told.is_contiguous() && told.scalar_type() == torch::kFloat32 &&
                    told.numel() == qmk::kTellings * heads * qmk::kTold,
                message("told must be fp32 [", qmk::kTellings, ", heads, ", qmk::kTold, "] in pinned memory"));
    TORCH_CHECK(heads > 0 && first_head >= 0 && first_head + heads <= all,
                message("heads must be in 0..", all - 1, ", got ", heads, " from ", first_head));
    TORCH_CHECK(text_at >= 0, message("text_at must be 0 or more, got ", text_at));
    s.queries = queries, s.told = told;
    s.look.first_head = static_cast<int>(first_head), s.look.heads = static_cast<int>(heads);
    s.look.text_at = static_cast<int>(text_at);
  }
  // How a slot's frames are drawn.
  void set_sampling(int64_t slot, const Settings& sampling, uint64_t seed) {
    qmk::Column& c = at(slot).column;
    c.seed = seed;
    c.repetition_penalty = static_cast<float>(sampling.at("repetition_penalty"));
    c.inverse_penalty = static_cast<float>(1.0 / sampling.at("repetition_penalty"));
    auto draw = [&](const std::string& prefix) {
      return qmk::DrawParams{static_cast<int>(sampling.at(prefix + "sample")),
                             static_cast<float>(1.0 / sampling.at(prefix + "temperature")),
                             static_cast<int>(sampling.at(prefix + "top_k")),
                             static_cast<float>(sampling.at(prefix + "top_p"))};
    };
    c.draw0 = draw("code0_");
    c.draw = draw("predictor_");
  }
  // Text rows bf16 [n][hidden] of a sequence, one per frame, and what follows them.
  void set_text(int64_t slot, const torch::Tensor& rows, const torch::Tensor& pad) {
    if (rows.size(0)) data_of<qmk::bf16>(rows, "text rows", torch::kBFloat16, hidden_);
    data_of<qmk::bf16>(pad, "pad", torch::kBFloat16, hidden_);
    at(slot).text = rows, at(slot).pad = pad;
  }
  // Where a slot stands, once its pages were filled by another hand (kept prefixes, tests, benchmarks).
  void seek(int64_t slot, int64_t position, int64_t frame) {
    Slot& s = settled(slot);
    s.column.position = static_cast<int>(position), s.column.frame = static_cast<int>(frame), s.talked = false;
  }

  // Keys and values of consecutive prompt rows.
  // rows: fp32 [n][hidden].
  void prefill(int64_t slot, const torch::Tensor& rows) {
    if (rows.size(0) == 0) return;
    const float* data = data_of<float>(rows, "rows", torch::kFloat32, rows.size(0) * hidden_);
    take_rows(settled(slot), rows.size(0),
              [&](qmk::Column& c, int64_t i) { c.input_id = qmk::kPrecomputed, c.row = data + i * hidden_; });
  }
  // The same of rows that the kernel makes: code 0's embedding of an id plus a row of text: bf16 [n][hidden].
  void prefill_ids(int64_t slot, const std::vector<int64_t>& ids, const torch::Tensor& text) {
    const int64_t n = static_cast<int64_t>(ids.size());
    const auto* data = data_of<qmk::bf16>(text, "text", torch::kBFloat16, n * hidden_);
    for (auto id : ids) check_id(id);
    take_rows(settled(slot), n, [&](qmk::Column& c, int64_t i) {
      c.input_id = static_cast<int>(ids[i]), c.input_text = data + i * hidden_;
    });
  }
  // Such a row, text bf16 [hidden], as the next frame's input, in place of what the last frame left.
  void set_input(int64_t slot, int64_t id, const torch::Tensor& text) {
    Slot& s = settled(slot);
    check_id(id);
    s.column.input_text = data_of<qmk::bf16>(text, "text", torch::kBFloat16, hidden_);
    s.column.input_id = static_cast<int>(id), s.input_text = text, s.talked = false;
  }

  // The rest of a prompt, from row `from` on: rows bf16 [n][hidden]. The last row is the first frame's input. While the
  // GPU is busy, prompts wait for each other until the next frame is launched.
  void enter(int64_t slot, const torch::Tensor& rows, int64_t from) {
    const int64_t last = rows.size(0) - 1;
    data_of<qmk::bf16>(rows, "rows", torch::kBFloat16, (from + 1) * hidden_);
    Slot& s = at(slot);
    if (from < last) {
      room(s, last - from);
      waiting_.push_back({slot, rows.slice(0, from, last + 1).to(torch::kFloat32)});
      if (!staged_prompts_.defined() || launched_ == collected_) settled(slot);
    }
    // What only frames read: the GPU is busy with the prompt meanwhile.
    s.row.copy_(rows[last]);
    s.seen.zero_();
  }

  // Queue one frame of each of these slots. texts: of each slot, from which token on tokens are told one by one, and
  // how many there are; empty if none is watched.
  void decode(const std::vector<int64_t>& slots, const std::vector<int>& texts) {
    TORCH_CHECK(!slots.empty() && static_cast<int>(slots.size()) <= columns_,
                message("a launch takes 1 to ", columns_, " slots, got ", slots.size()));
    TORCH_CHECK(launched_ - collected_ < qmk::kLaunchesAhead,
                message(qmk::kLaunchesAhead, " launches wait to be collected; collect() first"));
    TORCH_CHECK(texts.empty() || texts.size() == 2 * slots.size(),
                message("texts must have two numbers a slot, got ", texts.size(), " for ", slots.size(), " slots"));
    take_waiting();
    for (auto slot : slots) room(at(slot), 1);
    qmk::FrameParams p = p_;
    p.columns = 0, p.talked = 1;
    std::vector<qmk::Look> looks;
    const bool many = static_cast<int>(slots.size()) > qmk::kMostColumns;
    const int i = launched_ % qmk::kLaunchesAhead;
    qmk::Column* const columns =
        many ? reinterpret_cast<qmk::Column*>(staged_[i].data_ptr<uint8_t>() + kColumnsAt) : p.column;
    for (auto slot : slots) {
      Slot& s = at(slot);
      qmk::Column& c = columns[p.columns++] = s.column;
      if (s.look.heads && !texts.empty()) {
        c.watch = s.watch();
        qmk::Look& look = looks.emplace_back(s.look);
        look.queries = c.watch.queries, look.told = s.told.data_ptr<float>() + s.turn() * qmk::kTold;
        look.pages = c.pages, look.position = c.position;
        look.first = texts[2 * (p.columns - 1)], look.tokens = texts[2 * (p.columns - 1) + 1];
      }
      if (s.talked) c.residual = s.residual.data_ptr<float>();
      else p.talked = 0;
      c.first_fresh = c.position;
      const bool text = s.text.defined() && c.frame < s.text.size(0);
      c.text_row = reinterpret_cast<const qmk::bf16*>(text ? s.text.data_ptr() : s.pad.data_ptr()) +
                   (text ? c.frame * hidden_ : 0);
      s.column.position++, s.column.frame++, s.column.input_id = qmk::kPrecomputed, s.talked = false;
    }
    if (p.columns > qmk::kNarrowColumns) p.predictor_pace = wide_pace_;
    if (many) p.talked = 0;
    p.watched = !looks.empty();
    p.codes = codes_.data_ptr<int>() + i * columns_ * qmk::kResultWords;
    for (int column = 0; column < p.columns; column++) p.codes[column * qmk::kResultWords + qmk::kGroups] = 0;
    launch(p, many ? 0 : p.talker.layers + qmk::kGroups * p.predictor.layers);
    const c10::cuda::CUDAGuard guard(device_);
    check_cuda(cudaEventRecord(done_[i], c10::cuda::getCurrentCUDAStream(device_.index())));
    look(looks, done_[i]);
    launched_++;
  }

  // Wait for the oldest uncollected launch: int32 [columns][kResultWords], a view that the fourth launch from now
  // overwrites.
  torch::Tensor collect() {
    TORCH_CHECK(launched_ > collected_, "nothing is launched: decode() first");
    const int i = collected_++ % qmk::kLaunchesAhead;
    check_cuda(cudaEventSynchronize(done_[i]));
    await_told(collected_ - 2);
    return codes_[i];
  }
  // Wait for what is told of the launch that was collected last. All before it are told.
  void await_told() const { await_told(collected_ - 1); }
  int64_t uncollected() const { return launched_ - collected_; }

  // Where the next launches leave what tests and benchmarks look at; see FrameParams.
  void observe(const c10::optional<torch::Tensor>& hidden, const c10::optional<torch::Tensor>& logits,
               const c10::optional<torch::Tensor>& stage_ns) {
    TORCH_CHECK(!stage_ns || qmk::kStageClock, "this build has no stage clock: compile it with -DQMK_STAGE_CLOCK");
    observed_ = {hidden.value_or(torch::Tensor()), logits.value_or(torch::Tensor()),
                 stage_ns.value_or(torch::Tensor())};
    p_.hidden_out = hidden ? data_of<float>(*hidden, "hidden", torch::kFloat32, columns_ * hidden_) : nullptr;
    p_.logits_out = logits ? data_of<float>(*logits, "logits", torch::kFloat32, columns_ * qmk::kGroups) : nullptr;
    p_.stage_ns =
        stage_ns ? data_of<unsigned long long>(*stage_ns, "stage_ns", torch::kInt64, 2 * qmk::kStages) : nullptr;
  }

  torch::Tensor fault() const { return fault_; }  // [1], not 0 after a wait inside the kernel gave up
  int64_t epoch() const { return epoch_; }
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

 private:
  static void check_cuda(cudaError_t error) { qmk::check_cuda(error, "frame kernel"); }
  // What launches of many columns need besides.
  void prepare_batch() {
    TORCH_CHECK(columns_ <= qmk::kBatchColumns,
                message("a launch takes at most ", qmk::kBatchColumns, " columns, got ", columns_));
    const char* const names[qmk::kVectors] = {"input", "attended", "after_attention", "gated", "after_mlp"};
    for (int i = 0; i < qmk::kVectors; i++) {
      const std::string name = std::string("batch.") + names[i];
      p_.batch.vectors[i] = data<uint8_t>(name, torch::kUInt8);
      if (tensors_.count(name + "_squares")) p_.batch.squares[i] = data<float>(name + "_squares", torch::kFloat32);
    }
    p_.batch.qkv = data<float>("batch.qkv", torch::kFloat32);
    p_.batch.residual = data<float>("batch.residual", torch::kFloat32);
    p_.batch.hidden = data<float>("batch.hidden", torch::kFloat32);
    p_.batch.inverse = data<float>("batch.inverse", torch::kFloat32);
    p_.batch.code = data<int>("batch.code", torch::kInt32);
    p_.batch.frame_kv = data<qmk::bf16>("batch.frame_kv", torch::kBFloat16);
    const int64_t bytes = kColumnsAt + columns_ * static_cast<int64_t>(sizeof(qmk::Column));
    const auto host = torch::TensorOptions().dtype(torch::kUInt8).pinned_memory(true);
    staged_ = torch::zeros({qmk::kLaunchesAhead, bytes}, host);
    staged_prompts_ = torch::zeros({qmk::kLaunchesAhead, bytes}, host);
    sent_ = torch::zeros({bytes}, host.pinned_memory(false).device(device_));
    p_.batch.column = reinterpret_cast<const qmk::Column*>(sent_.data_ptr<uint8_t>() + kColumnsAt);
    check_cuda(graphs_.record(static_cast<int>(hidden_), columns_, p_,
                              reinterpret_cast<const qmk::FrameParams*>(sent_.data_ptr())));
  }
  // Tell how heads attended in the next launch, whose frame is queued. The stream beside lets neither the next frame
  // nor the codes wait for that.
  void look(const std::vector<qmk::Look>& looks, cudaEvent_t done) {
    const int64_t i = launched_ % qmk::kTellings;
    looked_[i] = !looks.empty();
    if (looks.empty()) return;
    qmk::Look* const staged = reinterpret_cast<qmk::Look*>(looks_.data_ptr<uint8_t>()) + i * slots_.size();
    std::copy(looks.begin(), looks.end(), staged);
    check_cuda(cudaStreamWaitEvent(beside_, done, 0));
    for (size_t from = 0, to = 0; from < looks.size(); from = to) {
      while (to < looks.size() && looks[to].heads == looks[from].heads) to++;
      check_cuda(
          qmk::launch_looks(staged + from, static_cast<int>(to - from), looks[from].heads, p_.kv, heads_, beside_));
    }
    check_cuda(cudaEventRecord(told_[i], beside_));
  }
  void await_told(int64_t launch) const {
    if (launch >= 0 && looked_[launch % qmk::kTellings])
      check_cuda(cudaEventSynchronize(told_[launch % qmk::kTellings]));
  }
  // Parameters and columns of a launch of many go to the GPU's memory: a graph's kernels find them at one place.
  cudaError_t launch_batch(const qmk::FrameParams& p, cudaStream_t stream) const {
    const torch::Tensor& all = p.prefill ? staged_prompts_ : staged_;
    uint8_t* const staged = all[launched_ % qmk::kLaunchesAhead].data_ptr<uint8_t>();
    std::memcpy(staged, &p, sizeof(p));
    check_cuda(cudaMemcpyAsync(sent_.data_ptr(), staged, kColumnsAt + p.columns * sizeof(qmk::Column),
                               cudaMemcpyHostToDevice, stream));
    return graphs_.launch(p.columns, p.prefill, stream);
  }
  // Clock cycles between two copies of a block, at `rate` times the speed at which memory can serve all blocks. The
  // rate is above 1, because a producer also stands still while its ring is full.
  static uint32_t cycles_between_copies(int device, double rate) {
    int clock_khz = 0, memory_khz = 0, bus_bits = 0;
    check_cuda(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
    check_cuda(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device));
    check_cuda(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, device));
    const double bytes_a_cycle = 2.0 * memory_khz * bus_bits / 8 / clock_khz / qmk::kBlocks;  // of a block; two edges
    if (!(bytes_a_cycle > 0)) return 0;  // a driver that does not tell: stages on the way are the only limit
    return static_cast<uint32_t>(qmk::kCopyBytes / bytes_a_cycle / rate);
  }
  // Of 15 stages of the predictor's weights, which every frame reads 15 times, those that stay in L2. All where they
  // fit. Else 40 % of L2, a fifth of the weights at most: more slowed an H200's frame down (2 of 15 are best in bf16,
  // 3 in E4M3; docs/log/2026-11-26.md#first-frame-starts).
  static int pinned_stages(int device, double bytes) {
    int l2 = 0;
    check_cuda(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    if (bytes < 0.85 * l2) return 15;
    return std::min(3, static_cast<int>(15 * 0.4 * l2 / bytes + 0.5));
  }
  Slot& at(int64_t slot) {
    TORCH_CHECK(slot >= 0 && slot < static_cast<int64_t>(slots_.size()),
                message("slot must be in 0..", slots_.size() - 1, ", got ", slot));
    return slots_[slot];
  }
  void room(const Slot& s, int64_t rows) const {
    TORCH_CHECK(s.pages.defined(), "this slot holds no sequence: start() it first");
    TORCH_CHECK(s.column.position + rows <= s.positions, message("position ", s.column.position + rows - 1,
                                                                 " is past the ", s.positions, " of the slot's pages"));
  }
  void check_id(int64_t id) const {
    const int64_t ids = tensors_.at("code0_embedding").size(0);
    TORCH_CHECK(id >= 0 && id < ids, message("an id must be in 0..", ids - 1, ", got ", id));
  }
  // A slot whose prompt no longer waits.
  Slot& settled(int64_t slot) {
    for (size_t i = 0; i < waiting_.size(); i++)
      if (waiting_[i].slot == slot) {
        const Waiting prompt = waiting_[i];
        waiting_.erase(waiting_.begin() + i);
        take(prompt);
        break;
      }
    return at(slot);
  }
  // A prompt by itself. If its last launch has a column free, that takes the first frame's input along. A frame of such
  // sequences alone then skips the talker, which takes a quarter of a frame. In other company the talker takes the row
  // once more, with the same result.
  void take(const Waiting& prompt) {
    const int64_t rows = prompt.rows.size(0) - 1, along = rows % qmk::kMostColumns != 0;
    prefill(prompt.slot, prompt.rows.slice(0, 0, rows + along));
    Slot& s = at(prompt.slot);
    s.column.position -= static_cast<int>(along), s.talked = along;
  }
  // Two prompts or more in one launch, as far as its columns go: weights are read once for all of them, with the bits
  // of each alone.
  void take_waiting() {
    std::vector<Waiting> waiting;
    waiting.swap(waiting_);
    qmk::FrameParams p = p_;
    p.prefill = 1, p.columns = 0;
    if (waiting.size() > 1) {
      auto* const columns = reinterpret_cast<qmk::Column*>(
          staged_prompts_[launched_ % qmk::kLaunchesAhead].data_ptr<uint8_t>() + kColumnsAt);
      for (Waiting& prompt : waiting) {
        const int rows = static_cast<int>(prompt.rows.size(0)) - 1;
        if (p.columns + rows > columns_) continue;
        qmk::Column& next = at(prompt.slot).column;
        for (int i = 0; i < rows; i++) {
          qmk::Column& c = columns[p.columns++] = next;
          c.row = prompt.rows.data_ptr<float>() + i * hidden_;
          c.position += i;
        }
        next.position += rows;
        prompt.slot = -1;
      }
    }
    if constexpr (qmk::kBatchColumns > 0)
      if (p.columns) {
        const c10::cuda::CUDAGuard guard(device_);
        check_cuda(launch_batch(p, c10::cuda::getCurrentCUDAStream(device_.index())));
      }
    for (const Waiting& prompt : waiting)
      if (prompt.slot >= 0) take(prompt);
  }
  // Keys and values of n rows, as many at a time as there are columns; input(column, i) sets the input of row i.
  template <class Input>
  void take_rows(Slot& s, int64_t n, Input input) {
    room(s, n);
    s.talked = false;
    for (int64_t from = 0; from < n;) {
      qmk::FrameParams p = p_;
      p.prefill = 1;
      p.columns = static_cast<int>(std::min<int64_t>(qmk::kMostColumns, n - from));
      const int first = s.column.position;
      for (int i = 0; i < p.columns; i++) {
        p.column[i] = s.column;
        input(p.column[i], from + i);
        p.column[i].position = first + i;
        p.column[i].first_fresh = first;
      }
      s.column.position += p.columns, from += p.columns;
      if (from == n) {
        qmk::Column& last = p.column[p.columns - 1];  // the first frame's, perhaps
        last.residual = s.residual.data_ptr<float>(), last.watch = s.watch(), p.watched = s.look.heads > 0;
      }
      launch(p, p.talker.layers);
    }
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
    if constexpr (qmk::kBatchColumns > 0) {
      if (p.columns > qmk::kMostColumns) return launch_batch(p, stream);
    }
    if constexpr (qmk::kWideColumns > 0) {
      if (p.columns > qmk::kNarrowColumns) return qmk::launch_frame<true>(talker_hidden, p, stream);
    }
    return qmk::launch_frame<false>(talker_hidden, p, stream);
  }
  template <class T>
  T* data(const std::string& name, torch::ScalarType dtype) {
    const auto it = tensors_.find(name);
    TORCH_CHECK(it != tensors_.end(), message("tensor ", name, " is missing"));
    return data_of<T>(it->second, name, dtype, 1);
  }

  int64_t hidden_;
  int columns_ = 0;  // of a launch, at most
  Tensors tensors_;  // kept alive as long as the pointers below
  std::vector<Slot> slots_;
  c10::Device device_{c10::kCPU};
  torch::Tensor codes_, fault_;
  // Of launches of many: parameters, then columns, on the host and on the GPU.
  static constexpr int64_t kColumnsAt = (sizeof(qmk::FrameParams) + 127) / 128 * 128;
  torch::Tensor staged_, staged_prompts_, sent_;
  std::vector<Waiting> waiting_;  // in the order in which they came
  qmk::BatchGraphs graphs_;
  std::array<torch::Tensor, 3> observed_;
  std::array<cudaEvent_t, qmk::kLaunchesAhead> done_{};
  // Of the latest launches: what shall be told of them (Look [kTellings][slots]), whether anything, and when it is.
  torch::Tensor looks_;
  std::array<bool, qmk::kTellings> looked_{};
  std::array<cudaEvent_t, qmk::kTellings> told_{};
  cudaStream_t beside_ = nullptr;
  qmk::TalkerHeads heads_{};
  int64_t launched_ = 0, collected_ = 0, epoch_ = 0;
  qmk::Pace wide_pace_{};  // the predictor's in wide launches
  qmk::FrameParams p_{};
};

// A model of DIMS (backend/sizes.py), with the padded width of its MLPs.
template <class Dims>
void add_dims(pybind11::dict& all) {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  all[pybind11::int_(T::kHidden)] = pybind11::make_tuple(
      pybind11::make_tuple(T::kHidden, T::kIntermediate, T::kHeads, T::kKvHeads, Dims::kCodecVocab),
      pybind11::make_tuple(P::kHidden, P::kIntermediate, P::kHeads, P::kKvHeads, P::kMaxLayers, Dims::kCodes));
}

}  // namespace

void bind_frame(pybind11::module_& m) {
  m.attr("BLOCKS") = qmk::kBlocks;
  m.attr("COLUMNS") = qmk::kNarrowColumns;
  m.attr("MOST_COLUMNS") = qmk::kMostColumns;
  m.attr("BATCH_COLUMNS") = qmk::kBatchColumns;
  m.attr("FRAME_KV_SHARED") = qmk::kFrameKvShared;
  pybind11::dict dims, fp8;
  add_dims<qmk::DimsDemo>(dims), add_dims<qmk::Dims06>(dims), add_dims<qmk::Dims17>(dims);
  m.attr("DIMS") = dims;
  fp8["talker"] = qmk::kFp8Talker, fp8["predictor"] = qmk::kFp8Predictor;
  fp8["codec_head"] = qmk::kFp8CodecHead, fp8["lm_heads"] = qmk::kFp8LmHeads;
  m.attr("FP8") = fp8;
  using Free = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Launcher>(m, "Launcher", pybind11::module_local())  // builds for other weights have one too
      .def(pybind11::init<int64_t, int64_t, Tensors, Settings>())
      .def("fill_tables", &Launcher::fill_tables, Free())
      .def("begin", &Launcher::begin)
      .def("watch", &Launcher::watch)
      .def("set_sampling", &Launcher::set_sampling)
      .def("set_text", &Launcher::set_text)
      .def("seek", &Launcher::seek)
      .def("prefill", &Launcher::prefill, Free())
      .def("prefill_ids", &Launcher::prefill_ids, Free())
      .def("set_input", &Launcher::set_input)
      .def("enter", &Launcher::enter)
      .def("decode", &Launcher::decode)
      .def("collect", &Launcher::collect, Free())
      .def("await_told", static_cast<void (Launcher::*)() const>(&Launcher::await_told), Free())
      .def("uncollected", &Launcher::uncollected)
      .def("observe", &Launcher::observe)
      .def("fault", &Launcher::fault)
      .def_property("epoch", &Launcher::epoch, &Launcher::set_epoch);
}
