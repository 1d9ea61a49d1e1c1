// The vocoder's kernels as the host calls them. All tensors fp32, rows of channels ("time-major"), contiguous.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace qmk {

enum class Activation : int { kNone = 0, kSnake = 1, kGelu = 2, kGate = 3 };

// What a causal layer looks at: of every stream `kept` rows of the past, then the `rows` new ones.
struct History {
  const float* fresh;   // [streams][rows][channels]
  const float* past;    // [slots][kept][channels]; unused where kept is 0
  const int* slots;     // [streams]
  int streams, rows, kept, channels;
};

// A causal convolution as a matrix product: out[stream, t] = bias + sum over taps of history[t + tap * dilation] * weight[tap].
// A transposed convolution is one too: its blocks of output rows are columns side by side.
struct Convolution {
  History in;
  int taps, dilation;     // in.kept == (taps - 1) * dilation
  const float* weight;    // [taps][in.channels][columns]
  const float* bias;      // [columns]
  int columns;
  const float* residual;  // [streams * rows][columns], added; or null
  float* out;             // the sum; or null
  float* activated;       // activation(sum), kGate: of half the columns; or null
  Activation activation;
  const float *frequency, *scale;  // SnakeBeta's, [channels_out], column modulo channels_out
  int channels_out;
  bool exact;             // three TF32 products for one of fp32, or a single one
  float rms_eps;          // above 0: of every row over its root mean square (the norm's weight is in the matrix)
};
cudaError_t convolve(const Convolution&, cudaStream_t);

// out[stream * rows + t] = sum over groups of table[group][codes[stream, t, group]]
cudaError_t sum_codebooks(const int* codes, const float* table, int rows, int groups, int size, int channels, float* out, cudaStream_t);

// A depthwise causal convolution of 7 taps, then LayerNorm.
cudaError_t depthwise_norm(const History& in, const float* weight /*[7][channels]*/, const float* bias, const float* gain, const float* shift, float eps, float* out, cudaStream_t);

// Attention of `rows` new positions a stream over a window; rotates queries and keys, keeps keys and values in rings.
struct Attention {
  const float* qkv;       // [streams * rows][3 * heads * head_dim]
  float *keys, *values;   // [slots][heads][ring][head_dim]
  const int* slots;
  const int64_t* position;  // [slots], of the first new row
  const float* inv_freq;  // [head_dim / 2]
  int streams, rows, heads, head_dim, ring, window;
  float* out;             // [streams * rows][heads * head_dim]
};
cudaError_t attend(const Attention&, cudaStream_t);

// The last convolution: 7 taps, one channel out, clamped to -1..1.
cudaError_t convolve_to_sound(const History& in, const float* weight /*[7][channels]*/, const float* bias, float* out, cudaStream_t);

// Every history's newest rows become its past; positions go on by `rows`.
struct Kept {
  const float* fresh;
  float* past;
  int32_t rows, kept, channels, unused;
};
cudaError_t keep_histories(const Kept* histories, int count, int widest, const int* slots, int64_t* position, int streams, int frames, cudaStream_t);

}  // namespace qmk
