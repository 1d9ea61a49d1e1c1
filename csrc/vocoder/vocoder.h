// The vocoder's kernels as the host calls them. Tensors are rows of channels ("time-major"), contiguous, 4 bytes a
// value: fp32, or where it says "halves", two fp16 as halves.cuh lays them out.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../sizes.h"

namespace qmk {

constexpr int kFewFrames = 16;  // a push with room for more takes kernels made for much, with the same bits

// What `convolve` does behind the sum; vocoder_recorder.py has the same numbers.
enum class Activation : int { kNone = 0, kSnake = 1, kGelu = 2 };

// The frames of a push, those of a sequence side by side. A recorded push has room for so many, and reads here how many
// there are. They stay the same from before its first kernel until behind its last one.
struct Frames {
  int count, sequences;
  struct {
    int slot, begin;  // of its sequence: the slot, and the first frame in this push
  } of[kPushRows];    // a frame each
  struct {
    int slot, begin, count;
  } sequence[kPushRows];
};

// What a causal layer looks at: of every sequence `kept` rows of the past, then the new ones.
struct History {
  const float* fresh;    // [room * rows][channels]
  const float* past;     // [kept][channels] of the first slot; unused where kept is 0
  int64_t stride;        // values from a slot's past to the next one's
  const Frames* frames;  // on the device
  int room, rows;        // frames, at most; rows of a frame
  int kept, channels;
};

// One push: its frames, and their codes, from the host or from where the frame kernel left them.
struct Push {
  Frames frames;
  int number[kPushRows];  // of each frame in its sequence, where the codes are on the device
  const int* recent;      // [slots][kRecentFrames][kGroups], frame f at f % kRecentFrames; or null
  float* sound;           // [frames * 1920] where the PCM goes: pinned host memory, or on the device
  int codes[kPushRows * kGroups];
};
// What the graph behind it reads: the frames, the sums of their codes' vectors, where the PCM goes. A code outside
// 0..size-1 is an end of speech that the host has not seen yet; it becomes the nearest valid code.
struct PushInputs {
  const float* table;  // [kGroups][size][channels]
  int size, channels;
  Frames* frames;
  float* embedding;  // [frames of the largest push][channels]
  float** sound;     // [1]
};
// Write a push's inputs, in front of its graph.
cudaError_t begin_push(const Push&, const PushInputs&, cudaStream_t);

// A causal convolution as a matrix product: out[sequence, t] = bias + sum over taps of history[t + tap * dilation] *
// weight[tap]. A transposed convolution is one too: its blocks of output rows are columns side by side.
struct Convolution {
  History in;          // halves
  int taps, dilation;  // in.kept == (taps - 1) * dilation
  // fp16 [taps][in.channels / 32][columns][64]: 32 high halves, 32 low ones. Of these 128 bytes, chunk c of 16 lies at
  // c ^ (column % 8): then `wgmma` and `ldmatrix` read eight columns at once from different banks.
  const uint16_t* weight;
  const float* bias;  // [columns]
  int columns;
  const float* residual;  // [room * rows][columns], added; or null
  float* out;             // the sum; or null
  float* activated;       // activation(sum), halves; or null
  Activation activation;
  const float *frequency, *scale;  // SnakeBeta's, [channels_out], column modulo channels_out
  int channels_out;
  bool exact;  // three fp16 products for one of fp32, or only that of the high halves, as precise as TF32
};
// Where a GPU can for so many channels, a convolution of one tap may follow in the same launch. The first one then has
// no output of its own, and its input is no output of the second.
bool can_follow(int channels);
cudaError_t convolve(const Convolution&, const Convolution* following, cudaStream_t);

// A depthwise causal convolution of 7 taps, then LayerNorm; out: halves.
cudaError_t depthwise_norm(const History& in, const float* weight /*[7][channels]*/, const float* bias,
                           const float* gain, const float* shift, float eps, float* out, cudaStream_t);

// The transformer between two linear layers: a position a frame, attention over a window, SwiGLU. The matrices contain
// RMSNorm's weights and the layer scales. They also contain the convolution before the first layer and the transposed
// one behind the last, because nothing lies between these and the linear layers.
struct Layers {
  History in;  // kTransformerTaps - 1 rows of the past
  float* out;  // [in.room][columns_out]
  // Of one product after the other (kTransformerTaps of the input, then qkv, o, gate and up, down of every layer,
  // output), of one block after the other: its columns, each [K]. Block b owns columns b * ceil(columns / blocks) ...;
  // gate and up alternate, and stay together.
  const float* weights;
  const float *bias_in, *bias_out;
  const float* inv_freq;    // [head_dim / 2]
  float* rings;             // [layers][2][heads][ring][head_dim] of the first slot: rotated keys, and values
  int64_t stride;           // values from a slot's rings to the next one's
  const int64_t* position;  // [slots], of the first new row
  // What blocks hand each other, a value and its epoch each: [room][hidden], [room][3 * heads * head_dim], [room][heads
  // * head_dim], [room][intermediate].
  uint2 *h, *qkv, *attended, *gated;
  float* vectors;   // the same without epochs, one behind the other: what the launches of a large push hand each other
  uint32_t* epoch;  // [1] of the last value published
  uint32_t spin_limit;       // polls before a wait gives up
  uint32_t* fault;           // [1] in host memory, not 0 after a wait gave up
  int blocks, shared_bytes;  // of a launch; of a block, which the GPU has room for
  int layers, hidden, intermediate, heads, head_dim, ring, window, columns_out;
  float eps;
};
cudaError_t transform(const Layers&, cudaStream_t);

// The last convolution, of halves: 7 taps, one channel out, clamped to -1..1; *out: where the PCM goes.
cudaError_t convolve_to_sound(const History& in, const float* weight /*[7][channels]*/, const float* bias,
                              float* const* out, cudaStream_t);

// The newest rows of some histories become their past.
struct Kept {
  struct {
    const float* fresh;
    float* past;
    int32_t rows, kept, channels, stride;  // rows of a frame
  } of[24];
  int count, widest, room;
  const Frames* frames;
  int64_t* position;  // [slots], goes on by a sequence's frames; or null
};
cudaError_t keep_histories(const Kept&, cudaStream_t);

}  // namespace qmk
