// The prompt's kernels for Python: checks tensors, launches on the current stream.
#include <cstring>
#include <vector>

#include "../frame/dims.cuh"
#include "../tensors.h"
#include "prompt.h"

namespace {

using qmk::check_cuda;
using qmk::data_of;
using qmk::message;
using qmk::stream_of;
using bf16 = __nv_bfloat16;

// Rows of talker width for text ids, bf16 [n][hidden] on the device of the weights; queued, not waited for.
// table: bf16 [ids][inner] on the host; weights as torch.nn.Linear has them.
torch::Tensor project_text(const std::vector<int64_t>& ids, const torch::Tensor& table, const torch::Tensor& weight1,
                           const torch::Tensor& bias1, const torch::Tensor& weight2, const torch::Tensor& bias2) {
  const int64_t n = ids.size(), inner = weight1.size(0), hidden = weight2.size(0), row = inner * sizeof(bf16);
  TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.scalar_type() == torch::kBFloat16 && table.dim() == 2 &&
                  table.size(1) == inner,
              message("the text's table must be bf16 [ids][", inner, "] on the CPU"));
  for (const auto* t : {&weight1, &bias1, &weight2, &bias2})
    TORCH_CHECK(t->is_cuda() && t->is_contiguous() && t->scalar_type() == torch::kBFloat16,
                "the text projection must be bf16 on the GPU");
  TORCH_CHECK(
      weight1.numel() == inner * inner && bias1.numel() == inner && weight2.numel() == hidden * inner &&
          bias2.numel() == hidden,
      message("the text projection must be [", inner, "][", inner, "] and [", hidden, "][", inner, "] with biases"));
  // From pinned memory, which the allocator keeps until the copy is done.
  const auto staged = torch::empty({n, inner}, torch::TensorOptions().dtype(torch::kBFloat16).pinned_memory(true));
  for (int64_t i = 0; i < n; i++) {
    TORCH_CHECK(ids[i] >= 0 && ids[i] < table.size(0), message("text id ", ids[i], " is not in the table"));
    std::memcpy(static_cast<char*>(staged.data_ptr()) + i * row,
                static_cast<const char*>(table.data_ptr()) + ids[i] * row, row);
  }
  const c10::cuda::CUDAGuard guard(weight1.device());
  const auto embedded = staged.to(weight1.device(), /*non_blocking=*/true);
  const auto between = torch::empty_like(embedded), out = torch::empty({n, hidden}, embedded.options());
  auto at = [](const torch::Tensor& t) { return reinterpret_cast<bf16*>(t.data_ptr()); };
  const qmk::Projection p{at(embedded),
                          at(weight1),
                          at(bias1),
                          at(weight2),
                          at(bias2),
                          at(between),
                          at(out),
                          static_cast<int>(inner),
                          static_cast<int>(hidden)};
  if (n) check_cuda(qmk::project_text(p, static_cast<int>(n), stream_of(weight1)), "text projection");
  return out;
}

// Rows of a prompt, bf16 [n][hidden]: `before`, then those of text ids plus `added` [hidden], then `after`. In one
// call, because every call into torch gives other Python threads a turn.
torch::Tensor prompt_rows(const torch::Tensor& before, const std::vector<int64_t>& ids, const torch::Tensor& table,
                          const torch::Tensor& weight1, const torch::Tensor& bias1, const torch::Tensor& weight2,
                          const torch::Tensor& bias2, const torch::Tensor& added, const torch::Tensor& after) {
  return torch::cat({before, project_text(ids, table, weight1, bias1, weight2, bias2) + added, after});
}

// ---- long prompts (paged_prefill.py): every tensor contiguous on one GPU unless said
bf16* halves(const torch::Tensor& t, int64_t at_least, const char* name) {
  return data_of<bf16>(t, name, torch::kBFloat16, at_least);
}

// The four matrices that `pack` put one behind the other at `start` bytes of every block's part of a ribbon uint8
// [blocks][bytes], each of sizes[i] bytes a block, into outs[i], bf16 [rows][k]. scales: fp32, of all their rows, where
// they are E4M3.
void unpack(const torch::Tensor& ribbon, int64_t start, const c10::optional<torch::Tensor>& scales,
            const std::vector<int64_t>& block_rows, const std::vector<int64_t>& packets,
            const std::vector<int64_t>& sizes, const std::vector<torch::Tensor>& outs) {
  TORCH_CHECK(ribbon.dim() == 2 && ribbon.size(0) == qmk::kBlocks,
              message("the ribbon must be uint8 [", qmk::kBlocks, "][bytes]"));
  TORCH_CHECK(outs.size() == qmk::kLayerMatrices && block_rows.size() == outs.size() && packets.size() == outs.size() &&
                  sizes.size() == outs.size(),
              message("expected ", qmk::kLayerMatrices, " matrices with their sizes, got ", outs.size()));
  const c10::cuda::CUDAGuard guard(ribbon.device());
  qmk::Ribbons all{};
  all.block_bytes = ribbon.size(1);
  const uint8_t* data = data_of<uint8_t>(ribbon, "the ribbon", torch::kUInt8, 1);
  int64_t rows = 0;
  for (const auto& out : outs) rows += out.size(0);
  const float* scale = scales ? data_of<float>(*scales, "scales", torch::kFloat32, rows) : nullptr;
  for (size_t i = 0; i < outs.size(); start += sizes[i], i++) {
    const auto& out = outs[i];
    TORCH_CHECK(out.dim() == 2 && start % 16 == 0 && block_rows[i] * out.size(1) * (scale ? 1 : 2) <= sizes[i] &&
                    start + sizes[i] <= ribbon.size(1),
                "each matrix must begin at a multiple of 16 bytes and end within the ribbon");
    all.matrix[i] = {
        data + start,
        static_cast<int>(out.size(0)),
        static_cast<int>(out.size(1)),
        static_cast<int>(block_rows[i]),
        static_cast<int>(packets[i]),
        static_cast<int>(sizes[i] / qmk::row_parts(static_cast<int>(block_rows[i]), static_cast<int>(out.size(1)))),
        reinterpret_cast<uint32_t*>(halves(out, 1, "out")),
        scale};
    if (scale) scale += out.size(0);
  }
  check_cuda(qmk::unpack(all, stream_of(ribbon)), "unpack");
}

void add_norm(const torch::Tensor& x, const c10::optional<torch::Tensor>& delta, const torch::Tensor& weight,
              double eps, const torch::Tensor& y) {
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t rows = x.size(0), hidden = x.size(1);
  TORCH_CHECK(x.dim() == 2 && hidden % 2 == 0, "x must be [rows][hidden]");
  check_cuda(qmk::add_norm(data_of<float>(x, "x", torch::kFloat32, 1),
                           delta ? halves(*delta, rows * hidden, "delta") : nullptr, halves(weight, hidden, "weight"),
                           static_cast<float>(eps), static_cast<int>(rows), static_cast<int>(hidden),
                           halves(y, rows * hidden, "y"), stream_of(x)),
             "add_norm");
}

// kv: one layer's, a view [pages][2][kv_heads][page][128] whose pages lie apart.
qmk::Heads heads(const torch::Tensor& kv, const torch::Tensor& at, const torch::Tensor& pages) {
  TORCH_CHECK(kv.dim() == 5 && kv.size(1) == 2 && kv.size(4) == qmk::kHeadDim && kv.is_cuda() &&
                  kv.scalar_type() == torch::kBFloat16 && kv[0].is_contiguous(),
              "kv must be bf16 [pages][2][kv_heads][page][128]");
  qmk::Heads p{};
  p.rows = static_cast<int>(at.numel());
  p.at = data_of<int64_t>(at, "at", torch::kInt64, 1), p.pages = data_of<int64_t>(pages, "pages", torch::kInt64, 1);
  p.kv = reinterpret_cast<bf16*>(kv.data_ptr()), p.page_stride = kv.stride(0);
  p.kv_heads = static_cast<int>(kv.size(2)), p.page = static_cast<int>(kv.size(3));
  return p;
}
void place_heads(const torch::Tensor& qkv, const torch::Tensor& q_norm, const torch::Tensor& k_norm,
                 const torch::Tensor& cos, const torch::Tensor& sin, const torch::Tensor& kv, const torch::Tensor& at,
                 const torch::Tensor& pages, double eps, const torch::Tensor& q) {
  const c10::cuda::CUDAGuard guard(qkv.device());
  qmk::Heads p = heads(kv, at, pages);
  TORCH_CHECK(q.dim() == 3 && q.size(1) == p.rows && q.size(2) == qmk::kHeadDim, "q must be [heads][rows][128]");
  p.heads = static_cast<int>(q.size(0)), p.eps = static_cast<float>(eps);
  p.qkv = halves(qkv, static_cast<int64_t>(p.rows) * (p.heads + 2 * p.kv_heads) * qmk::kHeadDim, "qkv"),
  p.q = halves(q, 1, "q");
  p.q_norm = halves(q_norm, qmk::kHeadDim, "q_norm"), p.k_norm = halves(k_norm, qmk::kHeadDim, "k_norm");
  p.cos = data_of<float>(cos, "cos", torch::kFloat32, qmk::kHeadDim / 2),
  p.sin = data_of<float>(sin, "sin", torch::kFloat32, qmk::kHeadDim / 2);
  check_cuda(qmk::place_heads(p, stream_of(qkv)), "place_heads");
}
// keys, values: [heads][length][128].
void gather(const torch::Tensor& kv, const torch::Tensor& at, const torch::Tensor& pages, const torch::Tensor& keys,
            const torch::Tensor& values) {
  const c10::cuda::CUDAGuard guard(kv.device());
  qmk::Heads p = heads(kv, at, pages);
  TORCH_CHECK(keys.dim() == 3 && keys.size(2) == qmk::kHeadDim && keys.size(0) % p.kv_heads == 0 &&
                  keys.sizes() == values.sizes(),
              "keys and values must be [heads][length][128]");
  TORCH_CHECK(keys.size(1) <= pages.numel() * p.page, "the slot has fewer positions");
  p.heads = static_cast<int>(keys.size(0));
  check_cuda(qmk::gather(p, static_cast<int>(keys.size(1)), halves(keys, 1, "keys"), halves(values, 1, "values"),
                         stream_of(kv)),
             "gather");
}
// both: (gate, up), alternating.
void gate(const torch::Tensor& both, const torch::Tensor& out) {
  const c10::cuda::CUDAGuard guard(both.device());
  check_cuda(qmk::gate(halves(both, 2 * out.numel(), "both"), out.numel(), halves(out, 1, "out"), stream_of(both)),
             "gate");
}

}  // namespace

void bind_prompt(pybind11::module_& m) {
  m.def("project_text", &project_text);
  m.def("prompt_rows", &prompt_rows);
  m.def("unpack", &unpack);
  m.def("add_norm", &add_norm);
  m.def("place_heads", &place_heads);
  m.def("gather", &gather);
  m.def("gate", &gate);
}
