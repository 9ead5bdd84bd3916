// The compiled kernels, one pair of functions an instantiation file. Declared without CUDA types.
#pragma once

#include "launch.h"

namespace dash {

void backward_bf16_d64(BackwardArgs const& args);
void backward_bf16_d128(BackwardArgs const& args);
void backward_fp16_d64(BackwardArgs const& args);
void backward_fp16_d128(BackwardArgs const& args);

int resident_ctas_bf16_d64(int device);
int resident_ctas_bf16_d128(int device);
int resident_ctas_fp16_d64(int device);
int resident_ctas_fp16_d128(int device);

}  // namespace dash
