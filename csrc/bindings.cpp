// The border to Python: checks every tensor, fills FrameParams once, launches frames.
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <map>
#include <string>

#include "frame.h"

namespace {

using Tensors = std::map<std::string, torch::Tensor>;

class Launcher {
 public:
  Launcher(int64_t talker_hidden, Tensors tensors, const std::map<std::string, double>& settings)
      : hidden_(talker_hidden), tensors_(std::move(tensors)) {
    TORCH_CHECK(hidden_ == 1024 || hidden_ == 2048, "talker width must be 1024 or 2048, got ", hidden_);
    auto stack = [&](const std::string& name, qmk::StackWeights& w) {
      w.ribbon = data<uint8_t>(name + ".ribbon", torch::kUInt8);
      w.input_norm = data<qmk::bf16>(name + ".input_norm", torch::kBFloat16);
      w.post_norm = data<qmk::bf16>(name + ".post_norm", torch::kBFloat16);
      w.q_norm = data<qmk::bf16>(name + ".q_norm", torch::kBFloat16);
      w.k_norm = data<qmk::bf16>(name + ".k_norm", torch::kBFloat16);
      w.norm = data<qmk::bf16>(name + ".norm", torch::kBFloat16);
      w.rope_cos = data<float>(name + ".rope_cos", torch::kFloat32);
      w.rope_sin = data<float>(name + ".rope_sin", torch::kFloat32);
    };
    stack("talker", p_.talker);
    stack("predictor", p_.predictor);
    p_.codec_head = data<uint8_t>("codec_head", torch::kUInt8);
    p_.lm_heads = data<uint8_t>("lm_heads", torch::kUInt8);
    if (hidden_ != 1024) {
      p_.adapter = data<uint8_t>("adapter", torch::kUInt8);
      p_.adapter_bias = data<float>("adapter_bias", torch::kFloat32);
    }
    p_.code0_embedding = data<qmk::bf16>("code0_embedding", torch::kBFloat16);
    p_.code_embedding = data<qmk::bf16>("code_embedding", torch::kBFloat16);
    auto exchange = [&](const char* name) { return data<qmk::Tagged>(name, torch::kInt64); };
    p_.x = {exchange("x.qkv"), exchange("x.attn"), exchange("x.split"), exchange("x.h_attn"),
            exchange("x.mlp"), exchange("x.h_mlp"), exchange("x.adapted"), exchange("x.logits"), exchange("x.noisy")};
    p_.fault = data<uint32_t>("fault", torch::kInt32);
    p_.kv = data<qmk::bf16>("kv", torch::kBFloat16);
    p_.codes = data<int>("codes", torch::kInt32);
    p_.eos_id = static_cast<int>(settings.at("eos_id"));
    p_.first_suppressed_id = static_cast<int>(settings.at("first_suppressed_id"));
    p_.min_frames = static_cast<int>(settings.at("min_frames"));
    p_.spin_limit = static_cast<uint32_t>(settings.at("spin_limit"));
  }

  // One prompt row (prefill) or one frame. Tensors belong to the slot; text_row is not read in a prefill.
  void launch(const torch::Tensor& row, const torch::Tensor& next_row, const torch::Tensor& text_row, const torch::Tensor& pages,
              const torch::Tensor& seen, int64_t position, int64_t frame, bool prefill, int64_t epoch,
              const std::map<std::string, double>& sampling, uint64_t seed,
              const c10::optional<torch::Tensor>& hidden_out, const c10::optional<torch::Tensor>& logits_out,
              const c10::optional<torch::Tensor>& stage_ns) {
    qmk::FrameParams p = p_;
    p.row = check<float>(row, "row", torch::kFloat32, hidden_);
    p.next_row = check<float>(next_row, "next_row", torch::kFloat32, hidden_);
    p.text_row = check<qmk::bf16>(text_row, "text_row", torch::kBFloat16, hidden_);
    p.pages = check<int>(pages, "pages", torch::kInt32, 1);
    TORCH_CHECK(position >= 0 && position < pages.numel() * qmk::kPagePositions, "position ", position, " is past the slot's ",
                pages.numel(), " pages");
    p.seen = check<uint8_t>(seen, "seen", torch::kUInt8, 1);
    p.position = static_cast<int>(position);
    p.frame = static_cast<int>(frame);
    p.prefill = prefill;
    p.repetition_penalty = static_cast<float>(sampling.at("repetition_penalty"));
    p.inverse_penalty = static_cast<float>(1.0 / sampling.at("repetition_penalty"));
    auto draw = [&](const std::string& prefix) {
      return qmk::DrawParams{static_cast<int>(sampling.at(prefix + "sample")),
                             static_cast<float>(1.0 / sampling.at(prefix + "temperature")),
                             static_cast<int>(sampling.at(prefix + "top_k")), static_cast<float>(sampling.at(prefix + "top_p"))};
    };
    p.draw0 = draw("code0_");
    p.draw = draw("predictor_");
    p.seed = seed;
    p.epoch = static_cast<uint32_t>(epoch);
    p.hidden_out = hidden_out ? check<float>(*hidden_out, "hidden_out", torch::kFloat32, hidden_) : nullptr;
    p.logits_out = logits_out ? check<float>(*logits_out, "logits_out", torch::kFloat32, 16) : nullptr;
    p.stage_ns = stage_ns ? check<unsigned long long>(*stage_ns, "stage_ns", torch::kInt64, 2 * qmk::kStages) : nullptr;
    const cudaError_t error = qmk::launch_frame(static_cast<int>(hidden_), p, c10::cuda::getCurrentCUDAStream());
    TORCH_CHECK(error == cudaSuccess, "frame kernel: ", cudaGetErrorString(error));
  }

 private:
  template <class T>
  static T* check(const torch::Tensor& t, const std::string& name, torch::ScalarType dtype, int64_t at_least) {
    TORCH_CHECK(t.is_cuda() && t.is_contiguous() && t.scalar_type() == dtype && t.numel() >= at_least, name, " must be a contiguous CUDA ",
                dtype, " tensor of at least ", at_least, " values, got ", t.toString(), " of ", t.numel());
    return reinterpret_cast<T*>(t.data_ptr());
  }
  template <class T>
  T* data(const std::string& name, torch::ScalarType dtype) {
    const auto it = tensors_.find(name);
    TORCH_CHECK(it != tensors_.end(), "tensor ", name, " is missing");
    return check<T>(it->second, name, dtype, 1);
  }

  int64_t hidden_;
  Tensors tensors_;  // kept alive as long as the pointers below
  qmk::FrameParams p_{};
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Launcher>(m, "Launcher")
      .def(pybind11::init<int64_t, Tensors, std::map<std::string, double>>())
      .def("launch", &Launcher::launch, pybind11::call_guard<pybind11::gil_scoped_release>());
}
