// The kernel for 9 to 16 sequences: frame.cu with two tiles of columns to every fragment of weights. Its partial sums
// take twice the shared memory, so the code predictor's keys and values lie in global memory.
#if QMK_WIDE_COLUMNS
#define QMK_WIDE
#include "frame.cu"
#endif
