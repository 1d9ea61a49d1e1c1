// How a row of keys or values lies in a page of the talker's.
#pragma once

namespace qmk {

// Place of a unit of 8 dims in its row of 16. Rows of a page are copied into shared memory as they are; in this order
// the lanes that load a tile of 16 positions (frame/attention.cuh) meet in no bank there.
__device__ __forceinline__ int unit_place(int position, int unit) {
  return unit ^ ((position >> 1 & 3) * 2 ^ (position & 1) * 4);
}

}  // namespace qmk
