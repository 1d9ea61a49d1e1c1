// The draw's noise: a function of (seed, frame, code group, candidate) alone, the same bits as sampling.py's.
//
// Philox4x32-10 turned into Gumbel noise by additions, multiplications and divisions that are each rounded once; the
// intrinsics keep the compiler from fusing them, which Python could not repeat.
#pragma once
#include <cstdint>

namespace qmk {

__device__ __forceinline__ uint32_t philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32_t high_a = __umulhi(a, 0xD2511F53u), low_a = a * 0xD2511F53u;
    const uint32_t high_c = __umulhi(c, 0xCD9E8D57u), low_c = c * 0xCD9E8D57u;
    a = high_c ^ b ^ key0, b = low_c, c = high_a ^ d ^ key1, d = low_a;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return a;
}

// -log((1 + m) * 2^exponent), |m| <= 1/2, by the series of atanh.
__device__ __forceinline__ float minus_log(float m, float exponent) {
  const float s = __fdiv_rn(m, __fadd_rn(m, 2.f)), square = __fmul_rn(s, s);
  float series = static_cast<float>(1.0 / 17.0);
  constexpr float kTerms[8] = {1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0};
#pragma unroll
  for (int i = 0; i < 8; i++) series = __fadd_rn(__fmul_rn(series, square), kTerms[i]);
  return -__fadd_rn(__fmul_rn(exponent, 0.6931471805599453f), __fmul_rn(__fmul_rn(s, series), 2.f));
}

// x > 0 as mantissa - 1, with the mantissa in [0.75, 1.5), and exponent.
__device__ __forceinline__ float2 split_float(float x) {
  const int bits = __float_as_int(x), exponent = (bits - 0x3F400000) >> 23;
  return make_float2(__fadd_rn(__int_as_float(bits - exponent * (1 << 23)), -1.f), static_cast<float>(exponent));
}

__device__ __forceinline__ float gumbel(uint64_t seed, uint32_t frame, uint32_t group, uint32_t candidate) {
  const float word = __uint2float_rn(philox(candidate, group, frame, 0u, seed));
  const float v = fminf(__fmul_rn(__fadd_rn(word, 0.5f), 0x1p-32f), 1.f - 0x1p-24f);
  const float2 rest = split_float(__fadd_rn(1.f, -v));
  const bool small = v < 0.5f;  // then log(1 - v) is taken from v itself, where 1 - v would round
  const float2 exponential = split_float(minus_log(small ? -v : rest.x, small ? 0.f : rest.y));
  return minus_log(exponential.x, exponential.y);
}

}  // namespace qmk
