// What crosses the border from host to kernel: one struct by value. No torch, no CUDA types beyond bf16.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "dims.cuh"

namespace qmk {

using bf16 = __nv_bfloat16;

// Values that travel between blocks carry the epoch that says which pass they belong to, in the same store.
struct alignas(8) Tagged {
  float value;
  uint32_t epoch;
};
struct alignas(16) Packet {
  uint32_t data[3], epoch;
};

struct StackWeights {
  const uint8_t* ribbon;  // [blocks][layers * stages of a layer][stage bytes], fragments in reading order, bf16 or E4M3
  const bf16* input_norm;  // [layers][hidden]
  const bf16* post_norm;   // [layers][hidden]
  const bf16* q_norm;      // [layers][head_dim]
  const bf16* k_norm;      // [layers][head_dim]
  const bf16* norm;        // [hidden], after the last layer
  const float* rope_cos;   // [positions][head_dim / 2]
  const float* rope_sin;   // [positions][head_dim / 2]
  int layers;
};

// Scratch through which blocks hand each other vectors; written and read within one layer pass. A vector of packets has
// packet p of column c at [p / 4][c][p % 4].
struct Exchange {
  Tagged* qkv;      // [columns][q + 2 kv]
  Packet* part;     // [columns][heads][splits][head_dim]: value, maximum, sum of one split
  Packet* attn;     // attention output, 4 bf16 a packet
  Packet* h_attn;   // residual after attention, 4 bf16 times the next norm's weight and their sum of squares
  Packet* mlp;      // gated MLP, 6 bf16 a packet
  Packet* h_mlp;    // residual after the MLP, like h_attn
  Packet* adapted;  // the adapter's output, like h_attn (1.7B)
  Packet* logits;   // [columns][codec vocabulary]: see Candidates
  Tagged* drawn;    // [blocks][columns] the code, one copy per reading block
};

struct DrawParams {
  int sample;  // 0: the largest logit
  float inverse_temperature;
  int top_k;    // 0: all
  float top_p;  // 1: all
};

constexpr int kPrecomputed = -1;  // the embedding sentinel: see Column::input_id

// Heads of the talker whose queries are kept, for word times. Heads are counted through all layers.
struct Watch {
  float* queries;  // [heads][head_dim], normed and turned
  int first, heads;
};

// One token: a sequence's next decode step, or one position of a prompt.
struct Column {
  int input_id = kPrecomputed;  // the input is row; from 0 on: code 0's embedding of this id plus input_text
  const float* row;             // [hidden]
  const bf16* input_text;       // [hidden]
  const bf16* text_row;         // [hidden] added to the sum of embeddings
  float* next_row;              // [hidden] the next position's input
  float* residual;              // [hidden] behind the talker's last layer: see FrameParams::talked
  const int* pages;             // this slot's page table
  uint8_t* seen;                // [codec vocabulary] code 0 ids spoken so far
  int* recent;                  // [kRecentFrames][kGroups] the codes of frame f at f % kRecentFrames, for the vocoder
  uint64_t seed;
  int position;
  int first_fresh;  // positions first_fresh .. position are columns of this launch, this one the last
  int frame;        // of the sequence, from 0
  float repetition_penalty, inverse_penalty;
  DrawParams draw0, draw;  // of code 0, of codes 1..15
  Watch watch;             // no heads where nothing is watched
};

// What layer 0 of the code predictor makes of a code, looked up instead of computed. From kFirstLookedUp on, a
// position's only input is the embedding of one code, and position and group go together. So queries, keys and values
// are the same in every frame, behind norm and rope. The kernel fills the tables itself, at load, by the instructions
// that they save.
struct Tables {
  bf16* heads;               // [positions][codes][qkv; what rounding left of q], or null: nothing is looked up
  float* adapted;            // [positions][codes][predictor hidden] the adapter's output, where there is one
  int fill;                  // 1: the launch only fills rows of the tables, one a column: of this position
  int position, first_code;  // and of codes first_code, first_code + 1, ...
};

// Vectors that a launch of many columns exchanges.
enum VectorName { kInput, kAttended, kAfterAttention, kGated, kAfterMlp, kVectors };

// How fast a block asks memory for weights. What a phase frees at once would be megabytes on their way, and every
// exchange would wait behind them.
struct Pace {
  int stages;       // of the ring that may be on their way; two producers fill the whole ring
  uint32_t cycles;  // between two copies of kCopyBytes
};

// What a launch of many columns has besides (batch.cuh). A vector holds wgmma's B operand.
struct Batch {
  const Column* column;  // [columns]
  uint8_t* vectors[kVectors];
  float* squares[kVectors];  // [columns][kComputeWarps] of a residual's values, or null
  float* qkv;                // [columns][q + 2 kv]
  float* residual;           // [columns][hidden] of the stack at work
  float* hidden;             // [columns][hidden] of the talker; then the sum of the embeddings so far
  float* inverse;            // [columns] 1 / rms of each behind the talker
  int* code;                 // [columns] that each drew last
  bf16* frame_kv;            // [predictor kv heads][kBatchColumns][layers][2][kGroups][head_dim]
};

struct FrameParams {
  StackWeights talker, predictor;
  const uint8_t* codec_head;    // ribbon of [codec vocabulary][hidden]
  const uint8_t* lm_heads;      // ribbons of [15][codes][predictor hidden]
  const uint8_t* adapter;       // ribbon of [predictor hidden][hidden], or null
  const float* adapter_bias;    // [predictor hidden], or null
  const bf16* code0_embedding;  // [codec vocabulary][hidden]
  const bf16* code_embedding;   // [15][codes][hidden]
  Tables tables;

  Exchange x;
  Batch batch;
  uint32_t epoch;       // of the last pass before this launch
  uint32_t spin_limit;  // polls before a wait gives up
  uint32_t* fault;      // [1] in host memory, not 0 behind a launch in which a wait gave up; it still ends normally

  bf16* kv;        // [pages][layers][2][kv heads][kPagePositions][head_dim], the talker's pool; see pages.cuh
  bf16* frame_kv;  // [blocks][layers][2][kGroups][head_dim], the code predictor's where shared memory has no room
  Pace talker_pace, predictor_pace;  // heads and adapter go at the predictor's
  int pinned;                        // of 15 stages of the predictor: they ask to stay in L2 from pass to pass
  int columns;
  int watched;  // 1: a column's heads are watched
  int prefill;  // 1: only the talker's layers run, for their keys and values, and for a column's residual if it has one
  int talked;   // 1: they ran in an earlier launch, and every column's residual is there
  int eos_id, first_suppressed_id, min_frames;
  int* codes;  // [columns][kResultWords] out; code 0 == eos_id: speech has ended
  Column column[kMostColumns];

  float* hidden_out;             // [columns][hidden] or null: after the talker's final norm
  float* logits_out;             // [columns][16][codec vocabulary] or null: before any rule
  unsigned long long* stage_ns;  // [2 * kStages] or null, of a build with QMK_STAGE_CLOCK: nanoseconds of block 0 in
                                 // each stage, added up

  // Of E4M3 weights, a scale a row; null where weights are bf16.
  const float* talker_scales;      // [layers][q, k, v; o; gate and up, alternating; down]
  const float* predictor_scales;   // the same
  const float* codec_head_scales;  // [codec vocabulary]
  const float* lm_head_scales;     // [15][codes]
};

constexpr int kResultWords = kGroups + 1;  // of a column: its codes, then 1 where a logit was no number

// A stage ends when its result is published; the wait for its input belongs to it. Talker first, then code predictor.
enum Stage { kQkv, kAttention, kO, kGateUp, kDown, kHead, kDraw, kStages };

}  // namespace qmk
