// A frame of many sequences as a CUDA graph: its kernels and their order (see order.cuh, and batch.cuh).
#if QMK_BATCH_COLUMNS
#include "batch.cuh"
#include "batch_attention.cuh"
#include "frame.h"

namespace qmk {
namespace {

// What the steps between the stacks' layers need of a launch.
template <class Dims>
struct Between : CodeRows<Dims> {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  using CodeRows<Dims>::p;

  // A packet of a stack's first input, times its norm.
  template <class S>
  __device__ __forceinline__ void set_input(int column, int packet, const float4& value, const bf16* norm) const {
    float square = 0.f;
    VectorLayout<S::kHidden>::store(p.batch.vectors[kInput], column, packet, normed(value, norm + packet * 4, square));
    store_square<S::kHidden>(p.batch.squares[kInput], column, packet, square, threadIdx.x % 32);
  }
  // What comes into the code predictor at a position, for a block: the talker's hidden state, or the embedding of
  // `code`. From position 1 on, the embeddings are added up.
  __device__ __forceinline__ void begin_pass(int position, int column, int code) const {
    const int group = max(position - 1, 0);
    const bool looked_up = pass_mode(p, position) == PassMode::kLookedUp;
    float* const residual = p.batch.residual + static_cast<size_t>(column) * P::kHidden;
    float* const hidden = p.batch.hidden + static_cast<size_t>(column) * T::kHidden;
    const bf16* const row = this->embedding(group, code);
    for (int packet = threadIdx.x; packet < T::kHidden / 4; packet += kComputeThreads) {
      float4* const sum = reinterpret_cast<float4*>(hidden) + packet;
      uint8_t* const rows = p.batch.vectors[kAfterMlp];
      const uint2 raw = position ? *reinterpret_cast<const uint2*>(row + packet * 4)
                                 : VectorLayout<T::kHidden>::load(rows, column, packet);
      const float4 part = widened(raw, position ? 1.f : p.batch.inverse[column]);
      if (position) *sum = group ? plus(*sum, part) : part;
      if constexpr (Dims::kAdapter) {
        if (position && !looked_up) VectorLayout<T::kHidden>::store(rows, column, packet, raw);
      } else {
        reinterpret_cast<float4*>(residual)[packet] = position ? part : *sum;
        if (!looked_up) set_input<P>(column, packet, part, p.predictor.input_norm);
      }
    }
    if constexpr (Dims::kAdapter)
      if (looked_up)
        for (int i = threadIdx.x; i < P::kHidden; i += kComputeThreads)
          residual[i] = p.tables.adapted[this->table_row(group, code) * P::kHidden + i];
  }
};

// The talker's input rows.
template <class Dims>
__global__ void __launch_bounds__(kComputeThreads) begin_kernel(const FrameParams* params) {
  using T = typename Dims::Talker;
  const Between<Dims> between{{*params}};
  const FrameParams& p = *params;
  cudaTriggerProgrammaticLaunchCompletion();
  const int column = blockIdx.x, packet = threadIdx.x;
  if (column >= p.columns || packet >= T::kHidden / 4) return;
  const float4 value = between.talker_input(p.batch.column[column], packet * 4);
  reinterpret_cast<float4*>(p.batch.residual + static_cast<size_t>(column) * T::kHidden)[packet] = value;
  between.template set_input<T>(column, packet, value, p.talker.input_norm);
}

// The second position of the code predictor: code 0.
template <class Dims>
__global__ void __launch_bounds__(kComputeThreads) begin_second_kernel(const FrameParams* params) {
  after_the_kernel_before();
  const FrameParams& p = *params;
  if (blockIdx.x < p.columns) Between<Dims>{{p}}.begin_pass(1, blockIdx.x, p.batch.code[blockIdx.x]);
}

// What `draw` needs of a block.
struct DrawBlock {
  struct {
    DrawScratch& draw;
  } s;
  uint32_t epoch;
  Patience patience;
  int tid, warp, lane;
};

// From a head's logits to a column's code, and what comes in next.
template <class Dims, bool First>
__global__ void __launch_bounds__(kComputeThreads) draw_kernel(const FrameParams* params, int group) {
  using T = typename Dims::Talker;
  constexpr int N = First ? Dims::kCodecVocab : Dims::kCodes;
  __shared__ DrawScratch scratch;
  after_the_kernel_before();
  const FrameParams& p = *params;
  const int column = blockIdx.x, tid = threadIdx.x;
  if (column >= p.columns) return;
  const Between<Dims> between{{p}};
  const Column& c = p.batch.column[column];
  DrawBlock b{{scratch}, p.epoch, {p.spin_limit, p.fault}, tid, tid / 32, tid % 32};
  Candidates<N> candidates;
  candidates.await(b, p.x.logits + static_cast<size_t>(column) * Dims::kCodecVocab);
  const int code = min(draw(b, candidates, First ? c.draw0 : c.draw, [](int) {}), N - 1);
  if (tid == 0) between.keep(c, column, First ? 0 : group, code), p.batch.code[column] = code;
  if constexpr (First) {
    const float inverse = inverse_rms_of<T::kHidden>(p.batch.squares[kAfterMlp], column);
    if (tid == 0) p.batch.inverse[column] = inverse;
    for (int i = tid; i < T::kHidden; i += kComputeThreads) {
      const size_t at = static_cast<size_t>(column) * T::kHidden + i;
      const float h = p.batch.residual[at] * inverse * __bfloat162float(p.talker.norm[i]);
      p.batch.hidden[at] = h;
      if (p.hidden_out) p.hidden_out[at] = h;
    }
    __syncthreads();
    between.begin_pass(0, column, 0);
  } else if (group + 1 < kGroups) {
    between.begin_pass(group + 1, column, code);
  } else {
    for (int i = tid; i < T::kHidden; i += kComputeThreads)
      c.next_row[i] = p.batch.hidden[static_cast<size_t>(column) * T::kHidden + i] +
                      __bfloat162float(between.embedding(group, code)[i]) + __bfloat162float(c.text_row[i]);
  }
}

template <class S>
struct PublishAttended {
  uint8_t* vector;

  __device__ __forceinline__ void operator()(int packet, int column, uint32_t low, uint32_t high) const {
    VectorLayout<S::kQ>::store(vector, column, packet, make_uint2(low, high));
  }
};

// How products with K of a row's values are cut, as measured (docs/log). Hidden: of the residual that they make. A
// share's sum of squares needs all its rows in one block: 128 of 1.7B.
constexpr int kOther = 0, kGates = 1;  // in place of a residual
template <int K, int Hidden>
struct CutOfProduct {
  using Type = Shape<4, 2, 1>;
};
template <>
struct CutOfProduct<1024, kGates> {
  using Type = Shape<4, 4, 1>;
};
template <int Rows>
struct CutOfProduct<2048, Rows> {
  using Type = Shape<4, 4, 2>;
};
template <>
struct CutOfProduct<2048, 1024> {
  using Type = Shape<8, 1, 4>;
};
template <>
struct CutOfProduct<3072, 1024> {
  using Type = Shape<4, 2, 4>;
};
template <>
struct CutOfProduct<2048, 2048> {
  using Type = Shape<8, 1, 4, 64>;
};
template <>
struct CutOfProduct<6144, 2048> {
  using Type = Shape<8, 1, 4, 64>;
};
template <int K, int Hidden = kOther>
using CutOf = typename CutOfProduct<K, Hidden>::Type;

// Puts the kernels of a frame on a stream, one after the other.
template <class Dims>
struct Recorder : WeightSteps {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;

  const FrameParams& p;             // what is the same in all launches; columns: of a launch, at most
  const FrameParams* const params;  // on the GPU, this launch's
  const cudaStream_t stream;
  cudaError_t error = cudaSuccess;

  // cluster: blocks of one; 0: there are none.
  template <class... Params, class... Args>
  void launch(void (*kernel)(Params...), dim3 blocks, int threads, int shared, int cluster, Args... args) {
    if (error != cudaSuccess) return;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attributes, config.numAttrs = cluster ? 2 : 1;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  }
  // A matrix of `rows` rows, from where it begins in block 0's ribbon; a block's has `stages` stages.
  template <class Q, class Finish>
  void product(const uint8_t* matrix, int stages, int rows, VectorName input, const Finish& finish) {
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(product_kernel<Q, Finish>, cudaFuncAttributeMaxDynamicSharedMemorySize, Q::kBytes);
    // No more clusters than there is room for at once, each with as many chunks as the others.
    const int clusters = rows / Q::kTileRows, chunks = (p.columns + Q::kChunk - 1) / Q::kChunk;
    const int most = max_of(1, room<Q, Finish>() / clusters), turns = (chunks + most - 1) / most;
    const ProductArgs args{matrix, static_cast<size_t>(stages) * kStageBytes, p.batch.vectors[input],
                           p.batch.squares[input], &params->columns};
    launch(product_kernel<Q, Finish>, dim3(clusters * Q::kSplit, (chunks + turns - 1) / turns), Q::kThreads, Q::kBytes,
           Q::kSplit > 1 ? Q::kSplit : 0, args, finish);
  }
  // Clusters of a product's kernel that the GPU has room for at once.
  template <class Q, class Finish>
  int room() {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = Q::kSplit, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(Q::kSplit), config.blockDim = dim3(Q::kThreads), config.dynamicSmemBytes = Q::kBytes;
    config.attrs = &cluster, config.numAttrs = 1;
    int clusters = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, product_kernel<Q, Finish>, &config);
    return clusters;
  }

  // attend(): of the layer.
  template <class S, class Attend>
  void layer(const StackWeights& w, const float* all_scales, int index, bool looked_up, Attend attend) {
    using Qkv = Product<S::kQkvRows, S::kHidden, S::kFp8, CutOf<S::kHidden>>;
    using O = Product<S::kHiddenRows, S::kQ, S::kFp8, CutOf<S::kQ, S::kHidden>>;
    using GateUp = Product<S::kGateUpRows, S::kHidden, S::kFp8, CutOf<S::kHidden, kGates>>;
    using Down = Product<S::kHiddenRows, S::kIntermediate, S::kFp8, CutOf<S::kIntermediate, S::kHidden>>;
    constexpr int kQkvStages = Qkv::M::stages(Qkv::kOf), kOStages = O::M::stages(O::kOf),
                  kGateUpStages = GateUp::M::stages(GateUp::kOf);
    const int stages = w.layers * kLayerStages<S>;
    const uint8_t* const ribbon = w.ribbon + static_cast<size_t>(index) * kLayerStages<S> * kStageBytes;
    const float* const scales = all_scales + (S::kFp8 ? index * S::kScales : 0);
    auto matrix = [&](int before) { return ribbon + static_cast<size_t>(before) * kStageBytes; };
    auto squares = [&](VectorName name) { return p.batch.squares[name]; };
    if (!looked_up)
      product<Qkv>(matrix(0), stages, S::kQkv, index ? kAfterMlp : kInput, QkvFinish<S>{p.batch.qkv, scales});
    attend();
    if (p.prefill && index + 1 == w.layers) return;  // all keys and values are there
    product<O>(matrix(kQkvStages), stages, S::kHidden, kAttended,
               ResidualFinish<S>{p.batch.residual, scales + S::kQkv, w.post_norm + index * S::kHidden,
                                 p.batch.vectors[kAfterAttention], squares(kAfterAttention)});
    const float* const mlp_scales = scales + S::kQkv + S::kHidden;
    product<GateUp>(matrix(kQkvStages + kOStages), stages, 2 * S::kIntermediate, kAfterAttention,
                    GatedFinish<S>{mlp_scales, p.batch.vectors[kGated]});
    product<Down>(matrix(kQkvStages + kOStages + kGateUpStages), stages, S::kHidden, kGated,
                  ResidualFinish<S>{p.batch.residual, mlp_scales + 2 * S::kIntermediate,
                                    index + 1 == w.layers ? w.norm : w.input_norm + (index + 1) * S::kHidden,
                                    p.batch.vectors[kAfterMlp], squares(kAfterMlp)});
  }

  // A head, the draw, and what comes in next.
  template <bool First>
  void head(int group) {
    constexpr int kInner = First ? T::kHidden : P::kHidden, kRows = First ? Dims::kHeadRows : Dims::kCodeRows,
                  kAll = First ? Dims::kCodecVocab : Dims::kCodes;
    constexpr bool kFp8 = First ? kFp8CodecHead : kFp8LmHeads;
    using Q = Product<kRows, kInner, kFp8, CutOf<kInner>>;
    static_assert(kAll % Q::kTileRows == 0);
    constexpr int kStages = Q::M::stages(Q::kOf);
    const uint8_t* const ribbon =
        First ? p.codec_head : p.lm_heads + static_cast<size_t>(group - 1) * kBlocks * kStages * kStageBytes;
    const float* const scales =
        First ? p.codec_head_scales : p.lm_head_scales + (kFp8 ? (group - 1) * Dims::kCodes : 0);
    product<Q>(ribbon, kStages, kAll, kAfterMlp, LogitFinish<Dims, First, kFp8>{params, scales, group});
    launch(draw_kernel<Dims, First>, dim3(p.columns), kComputeThreads, 0, 0, params, group);
  }

  void talker() {
    launch(begin_kernel<Dims>, dim3(p.columns), kComputeThreads, 0, 0, params);
    for (int index = 0; index < p.talker.layers; index++)
      layer<T>(p.talker, p.talker_scales, index, false, [&] { attend_talker(index); });
  }
  void codec_head() { head<true>(0); }
  void adapter(const Pass& pass) {
    using Q = Product<P::kHiddenRows, T::kHidden, false, CutOf<T::kHidden, P::kHidden>>;
    product<Q>(p.adapter, Q::M::stages(Q::kOf), P::kHidden, kAfterMlp,
               AdapterFinish<P>{pass.position ? nullptr : p.batch.inverse, p.adapter_bias, p.batch.residual,
                                p.predictor.input_norm, p.batch.vectors[kInput], p.batch.squares[kInput]});
  }
  void predictor(const Pass& pass) {
    const bool looked_up = pass_mode(p, pass.position) == PassMode::kLookedUp;
    for (int index = 0; index < p.predictor.layers; index++)
      layer<P>(p.predictor, p.predictor_scales, index, looked_up && index == 0,
               [&] { attend_predictor(pass.position, index, looked_up && index == 0); });
  }
  // Behind the other passes, the draw makes what comes in next.
  void end_pass(const Pass& pass) {
    if (!pass.drawn_group()) launch(begin_second_kernel<Dims>, dim3(p.columns), kComputeThreads, 0, 0, params);
  }
  void lm_head(const Pass& pass) { head<false>(pass.drawn_group()); }

  void attend_talker(int index) {
    const TalkerAttention args{p.batch.qkv, p.batch.column, &params->columns, p.kv, p.talker, index};
    const dim3 blocks(T::kKvHeads, p.columns);
    const PublishAttended<T> publish{p.batch.vectors[kAttended]};
    if (!p.prefill)
      return launch(talker_attention<T, false, PublishAttended<T>>, blocks, kAttentionThreads, 0, 0, args, publish);
    launch(keep_prompt_kernel<T>, blocks, 2 * 32, 0, 0, args);
    if (index + 1 < p.talker.layers)
      launch(talker_attention<T, true, PublishAttended<T>>, blocks, kAttentionThreads, 0, 0, args, publish);
  }
  void attend_predictor(int position, int index, bool looked_up) {
    const size_t rows = static_cast<size_t>(position - kFirstLookedUp) * Dims::kCodes;
    const bf16* const table = looked_up ? p.tables.heads + rows * (P::kQkv + P::kQ) : nullptr;
    const PredictorAttention args{p.batch.qkv, p.batch.frame_kv, table, p.batch.code,
                                  p.predictor, &params->columns, index, position};
    launch(predictor_attention<P, PublishAttended<P>>,
           dim3(P::kKvHeads, (p.columns + kAttentionWarps - 1) / kAttentionWarps), kAttentionThreads, 0, 0, args,
           PublishAttended<P>{p.batch.vectors[kAttended]});
  }
};

// Record a frame, or rows of prompts, of up to p.columns columns.
template <class Dims>
cudaError_t record_frame(const FrameParams& p, const FrameParams* on_gpu, cudaGraphExec_t* made) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (error == cudaSuccess) {
    Recorder<Dims> recorder{{}, p, on_gpu, stream};
    run_frame<Dims>(p, recorder);
    error = cudaStreamEndCapture(stream, &graph);
    if (recorder.error != cudaSuccess) error = recorder.error;
  }
  if (error == cudaSuccess) error = cudaGraphInstantiate(made, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return error;
}

}  // namespace

cudaError_t BatchGraphs::record(int talker_hidden, int columns, FrameParams p, const FrameParams* on_gpu) {
  for (int i = 0; i * kStep < columns; i++)
    for (p.prefill = 0; p.prefill < 2; p.prefill++) {
      p.columns = (i + 1) * kStep;
      cudaGraphExec_t graph = nullptr;
      cudaError_t error = cudaErrorInvalidValue;
      switch (talker_hidden) {
        case DimsDemo::Talker::kHidden: error = record_frame<DimsDemo>(p, on_gpu, &graph); break;
        case Dims06::Talker::kHidden: error = record_frame<Dims06>(p, on_gpu, &graph); break;
        case Dims17::Talker::kHidden: error = record_frame<Dims17>(p, on_gpu, &graph); break;
      }
      if (error != cudaSuccess) return error;
      graphs_[p.prefill].push_back(graph);
    }
  return cudaSuccess;
}
cudaError_t BatchGraphs::launch(int columns, bool prefill, cudaStream_t stream) const {
  return cudaGraphLaunch(graphs_[prefill].at((columns - 1) / kStep), stream);
}

}  // namespace qmk
#endif
