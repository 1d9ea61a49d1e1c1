// What crosses the border from host to kernel: one struct by value. No torch, no CUDA types beyond bf16.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace qmk {

using bf16 = __nv_bfloat16;

// A value that travels between blocks, with the epoch that says which pass it belongs to.
struct alignas(8) Tagged {
  float value;
  uint32_t epoch;
};

struct StackWeights {
  const uint8_t* ribbon;   // [blocks][layers * stages of a layer][stage bytes], fragments in reading order
  const bf16* input_norm;  // [layers][hidden]
  const bf16* post_norm;   // [layers][hidden]
  const bf16* q_norm;      // [layers][head_dim]
  const bf16* k_norm;      // [layers][head_dim]
  const bf16* norm;        // [hidden], after the last layer
  const float* rope_cos;   // [positions][head_dim / 2]
  const float* rope_sin;   // [positions][head_dim / 2]
};

// Scratch through which blocks hand each other vectors; written and read within one layer pass.
struct Exchange {
  Tagged* qkv;     // [q + 2 kv]
  Tagged* attn;    // [splits][q], each split's own weighted mean of values
  Tagged* split;   // [heads][splits][2], maximum and sum of a split's softmax
  Tagged* h_attn;  // [hidden], residual after attention
  Tagged* mlp;     // [intermediate]
  Tagged* h_mlp;   // [hidden], residual after the MLP
  Tagged* adapted; // [predictor hidden], the adapter's output (1.7B)
  Tagged* logits;  // [codec vocabulary], behind rules and temperature
  Tagged* noisy;   // [codec vocabulary], plus noise
};

struct DrawParams {
  int sample;                // 0: the largest logit
  float inverse_temperature;
  int top_k;                 // 0: all
  float top_p;               // 1: all
};

struct FrameParams {
  StackWeights talker, predictor;
  const uint8_t* codec_head;      // ribbon of [codec vocabulary][hidden]
  const uint8_t* lm_heads;        // ribbon of [15][codes][predictor hidden]
  const uint8_t* adapter;         // ribbon of [predictor hidden][hidden], or null
  const float* adapter_bias;      // [predictor hidden], or null
  const bf16* code0_embedding;    // [codec vocabulary][hidden]
  const bf16* code_embedding;     // [15][codes][hidden]

  Exchange x;
  uint32_t epoch;                 // of the last pass before this launch; grows for ever, wraps harmlessly
  uint32_t spin_limit;            // polls before a wait gives up
  uint32_t* fault;                // [1], not 0 after a wait gave up; the launch still ends normally

  const float* row;               // [hidden] this position's input
  const bf16* text_row;           // [hidden] added to the sum of embeddings
  float* next_row;                // [hidden] the next position's input
  bf16* kv;                       // [pages][layers][2][kv heads][64][head_dim], the talker's pool
  const int* pages;               // this slot's page table
  int position;                   // of `row`
  int frame;                      // of the stream, from 0
  int prefill;                    // 1: only the talker's layers run, for their keys and values
  int eos_id, first_suppressed_id, min_frames;
  float repetition_penalty, inverse_penalty;
  DrawParams draw0, draw;         // of code 0, of codes 1..15
  uint64_t seed;
  uint8_t* seen;                  // [codec vocabulary] code 0 ids spoken so far
  int* codes;                     // [16] out; codes[0] == eos_id: speech has ended

  float* hidden_out;              // [hidden] or null: after the talker's final norm
  float* logits_out;              // [16][codec vocabulary] or null: before any rule
  unsigned long long* stage_ns;   // [2 * kStages] or null: nanoseconds of block 0 in each stage, added up
};

constexpr int kPagePositions = 64;

// A stage ends when its result is published; the wait for its input belongs to it. Talker first, then code predictor.
enum Stage { kQkv, kAttention, kOut, kGateUp, kDown, kHead, kDraw, kStages };

}  // namespace qmk
